// Search in a folder that was opened without a server. Browsers refuse a Worker there, so this one
// runs its script in a hidden frame: an empty frame belongs to its page, even in a folder.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inner = this.frame.contentWindow;
      // The script's own postMessage speaks to the page.
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      const script = inner.document.createElement("script");
      script.src = url;
      this.ready = new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = () => reject(new Error(`cannot load ${url}`));
      });
      this.ready.catch((error) => this.dispatchEvent(new ErrorEvent("error", { error })));
      inner.document.body.appendChild(script);
    }

    // Messages wait for the script, in their order.
    postMessage(data) {
      const event = () => new this.frame.contentWindow.MessageEvent("message", { data });
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(event()));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
