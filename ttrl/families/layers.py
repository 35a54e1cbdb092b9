"""Count a layer, part by part.

A layer is a sum of parts: attention, a recurrence, a feed-forward half, a mixture of experts. Sizes
and matrix names are those of transformers' classes, unless ttrl's own decoder computes them.

Scans are counted as recurrences, token by token, in multiplications with an addition for each head:

    gated delta rule   3·K·V   S k, the update of S, S q; S is [K, V] (arXiv 2412.06464)
    KDA                3·K·V   the same, with a decay for each channel (arXiv 2510.26692)
    Mamba 2            2·N·P   the update of h, C h; h is [N, P] (arXiv 2405.21060)

Chunked kernels make some more to use matrix products: with chunks of C tokens, the delta rule's
about C·(3·K + 2·V) more. Convolutions along the tokens count with the scans.

Letters: D width, H query heads, K key/value heads or a key's width, E dimension of a head, V a
value's width, N a state's width, P a head's width.
"""

from dataclasses import dataclass

from ttrl.families.values import EXPERTS, Values

_CHUNK = 64  # tokens of a chunk of the delta rule


@dataclass(frozen=True)
class Matrix:
    """A matrix, or the matrices of all experts of a layer."""

    name: str
    before: int
    behind: int
    experts: int = 1
    chosen: int = 1
    """Experts used by a token."""

    @property
    def entries(self) -> int:
        """Count all parameters of the matrix or matrices."""
        return self.before * self.behind * self.experts

    @property
    def passed(self) -> int:
        """Count the parameters multiplied with a token."""
        return self.before * self.behind * self.chosen


@dataclass(frozen=True)
class Layer:
    """A layer, or a part of one."""

    matrices: tuple[Matrix, ...] = ()
    vectors: int = 0
    """Entries of norms, biases and convolutions."""
    idle_vectors: int = 0
    """Of these, those of a token's unused experts."""
    norms: int = 0
    """Norms over the stream."""
    pair: int = 0
    """Multiplications for a pair of query and key, of all heads; 0: it does not attend."""
    window: int | None = None
    cache: int = 0
    """A server's numbers for each token."""
    state: int = 0
    """A server's numbers for each sequence; 0: there is no recurrence."""
    scan: int = 0
    """Multiplications of recurrence and convolution for each token."""
    kept: int = 0
    """Numbers for the backward pass for each token, besides the inputs of matrices."""

    def __add__(self, other: "Layer") -> "Layer":
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__dataclass_fields__
            if name != "window"
        }
        return Layer(**sums, window=other.window if self.window is None else self.window)

    @property
    def parameters(self) -> int:
        """Count all parameters."""
        return sum(one.entries for one in self.matrices) + self.vectors

    @property
    def idle(self) -> int:
        """Count the parameters of a token's unused experts."""
        return sum(one.entries - one.passed for one in self.matrices) + self.idle_vectors

    @property
    def passed(self) -> int:
        """Count the entries of the matrices each token passes."""
        return sum(one.passed for one in self.matrices)


NOTHING = Layer()


@dataclass(frozen=True)
class Kinds:
    """A model, layer by layer."""

    layers: tuple[Layer, ...]
    outside: Layer = NOTHING
    """Each token's other parameters, embeddings, last norm and head excluded."""
    looked_up: int = 0
    """Entries of further tables of embeddings."""
    norm_vectors: int = 1
    """The last norm's vectors: 0, 1 (a weight) or 2 (and a bias)."""
    head_bias: bool = False


def norms(values: Values, count: int, vectors: int = 1) -> Layer:
    """Return norms over the stream. vectors: 2 with a bias."""
    return Layer(vectors=count * vectors * values.width, norms=count)


def attention(
    values: Values,
    *,
    query_key_norms: str = "",
    bias: bool = False,
    output_bias: bool | None = None,
    gated: bool = False,
    output: str = "o_proj",
    window: int | None = None,
    head_dim: int | None = None,
    key_value_heads: int | None = None,
) -> Layer:
    """Return attention with grouped heads. query_key_norms: "head", one for all heads of E each;
    "width", of all heads together; "heads", one for each head. gated: queries come with gates."""
    width = values.width
    dim = head_dim or values.head_dim
    queries = values.heads * dim
    keys = (key_value_heads or values.key_value_heads) * dim
    of_norms = {"": 0, "head": 2 * dim, "width": queries + keys, "heads": queries + keys}
    first = queries * (2 if gated else 1)
    biases = (first + 2 * keys) * bias
    biases += width * (bias if output_bias is None else output_bias)
    matrices = (
        Matrix("q_proj", width, first),
        Matrix("k_proj", width, keys),
        Matrix("v_proj", width, keys),
        Matrix(output, queries, width),
    )
    kept = first + 2 * keys + queries + 3 * (queries + keys) * bool(query_key_norms)
    return Layer(
        matrices,
        vectors=of_norms[query_key_norms] + biases,
        pair=2 * queries,
        window=window,
        cache=2 * keys,
        kept=kept,
    )


def latent_attention(values: Values) -> Layer:
    """Return attention with keys and values from a latent vector (MLA, arXiv 2405.04434). A
    server's cache holds the vector and the keys' part with positions."""
    width = values.width
    heads = values.heads
    rope = values.number("qk_rope_head_dim", default=64)
    nope = values.number("qk_nope_head_dim", default=128)
    value = values.number("v_head_dim", default=128)
    latent = values.number("kv_lora_rank", default=512)
    rank = values.get("q_lora_rank")
    bias = bool(values.get("attention_bias"))
    queries = heads * (nope + rope)
    first: tuple[Matrix, ...] = (Matrix("q_proj", width, queries),)
    vectors = latent + (latent + rope + width) * bias
    if rank:
        first = (Matrix("q_a_proj", width, rank), Matrix("q_b_proj", rank, queries))
        vectors += rank + rank * bias
    matrices = (
        *first,
        Matrix("kv_a_proj_with_mqa", width, latent + rope),
        Matrix("kv_b_proj", latent, heads * (nope + value)),
        Matrix("o_proj", heads * value, width),
    )
    return Layer(
        matrices,
        vectors=vectors,
        pair=heads * (nope + rope + value),
        cache=latent + rope,
        kept=4 * queries + heads * (nope + value) + 2 * latent,
    )


def delta_rule(
    values: Values, *, names: tuple[str, str, str] = ("", "", ""), output: str = "out_proj"
) -> Layer:
    """Return the gated delta rule of Qwen 3 Next and others. names: of the matrices of queries,
    keys and values, if they are three."""
    width = values.width
    key_heads = values.number("linear_num_key_heads", default=16)
    heads = values.number("linear_num_value_heads", default=32)
    key_dim = values.number("linear_key_head_dim", default=128)
    dim = values.number("linear_value_head_dim", default=128)
    kernel = values.number("linear_conv_kernel_dim", default=4)
    keys = key_heads * key_dim
    inner = heads * dim
    channels = 2 * keys + inner
    matrices = (
        Matrix(names[0], width, keys),
        Matrix(names[1], width, keys),
        Matrix(names[2], width, inner),
        Matrix("gate", width, inner),
        Matrix("decay", width, 2 * heads),
        Matrix(output, inner, width),
    )
    return Layer(
        matrices,
        vectors=channels * kernel + 2 * heads + dim,
        state=heads * key_dim * dim + channels * (kernel - 1),
        scan=3 * heads * key_dim * dim + channels * kernel,
        kept=_kept_by_delta_rule(heads, key_dim, dim, channels) + 2 * inner,
    )


def kimi_delta_attention(values: Values) -> Layer:
    """Return KDA, the delta rule with a decay for each channel."""
    width = values.width
    heads = values.number("linear_num_heads", default=32)
    dim = values.number("linear_head_dim", default=128)
    kernel = values.number("linear_conv_kernel_dim", default=4)
    inner = heads * dim
    matrices = (
        Matrix("q_proj", width, inner),
        Matrix("k_proj", width, inner),
        Matrix("v_proj", width, inner),
        Matrix("f_a_proj", width, dim),
        Matrix("f_b_proj", dim, inner),
        Matrix("b_proj", width, heads),
        Matrix("g_a_proj", width, dim),
        Matrix("g_b_proj", dim, inner),
        Matrix("o_proj", inner, width),
    )
    return Layer(
        matrices,
        vectors=3 * inner * kernel + inner + heads + dim,
        state=heads * dim * dim + 3 * inner * (kernel - 1),
        scan=3 * heads * dim * dim + 3 * inner * kernel,
        kept=_kept_by_delta_rule(heads, dim, dim, 3 * inner) + 4 * inner + 4 * inner * _CHUNK,
    )


def _kept_by_delta_rule(heads: int, key_dim: int, dim: int, channels: int) -> int:
    """Return the chunked rule's numbers for a token: inputs and outputs of the convolution, queries
    and keys normed and multiplied, values, and a chunk's scores."""
    return 2 * channels + heads * (8 * key_dim + 6 * dim + 8 * _CHUNK)


def mamba2(
    values: Values, *, normed: bool = True, bias: bool = False, output_bias: bool | None = None
) -> Layer:
    """Return Mamba 2 of Granite, Bamba, Falcon-H1 and Nemotron-H."""
    width = values.width
    heads = values.number("mamba_n_heads", "mamba_num_heads", default=128)
    dim = values.get("mamba_d_head", "mamba_head_dim")
    inner = values.get("mamba_d_ssm")
    if not isinstance(dim, int):
        if inner is None:
            whole = values.number("mamba_expand", "expand", default=2) * width
        else:
            whole = inner
        dim = whole // heads
    inner = heads * dim if inner is None else inner
    state = values.number("mamba_d_state", "ssm_state_size", default=128)
    groups = values.number("mamba_n_groups", "n_groups", default=1)
    kernel = values.number("mamba_d_conv", "conv_kernel", default=4)
    channels = inner + 2 * groups * state
    chunk = values.number("mamba_chunk_size", "chunk_size", default=256)
    first = inner + channels + heads
    conv_bias = bool(values.get("mamba_conv_bias", "use_conv_bias", default=True))
    biases = first * bias + width * (bias if output_bias is None else output_bias)
    return Layer(
        (Matrix("in_proj", width, first), Matrix("out_proj", inner, width)),
        vectors=channels * (kernel + conv_bias) + 3 * heads + inner * normed + biases,
        state=heads * dim * state + channels * (kernel - 1),
        scan=2 * heads * dim * state + channels * kernel,
        kept=first + 2 * channels + 11 * inner + 3 * heads * chunk,
    )


def short_convolution(values: Values) -> Layer:
    """Return the gated convolution of LFM2."""
    width = values.width
    kernel = values.number("conv_L_cache", default=3)
    bias = bool(values.get("conv_bias"))
    return Layer(
        (Matrix("in_proj", width, 3 * width), Matrix("out_proj", width, width)),
        vectors=width * kernel + 5 * width * bias,
        state=width * (kernel - 1),
        scan=width * kernel,
        kept=6 * width,
    )


GATED = ("gate_proj", "up_proj", "down_proj")


def feed_forward(
    values: Values,
    width: int,
    *,
    names: tuple[str, ...] = GATED,
    bias: bool = False,
) -> Layer:
    """Return a feed-forward layer. width: its inner one. names: of its matrices, the last one back;
    one before it holds both halves if its name has both."""
    *into, back = names
    outer = values.width
    if len(into) == 1 and into[0] in ("gate_up_proj", "input_linear"):
        times = 2
    else:
        times = 1
    matrices = [Matrix(name, outer, times * width) for name in into]
    wide = times * len(into)
    return Layer(
        (*matrices, Matrix(back, width, outer)),
        vectors=(wide * width + outer) * bias,
        kept=(wide + 1) * width,
    )


def experts(
    values: Values,
    width: int,
    *,
    gated: bool = True,
    bias: bool = False,
    outer: int | None = None,
) -> Layer:
    """Return a mixture of experts and its router. width: an expert's inner one. outer: an expert's
    input width, unless it is the stream's."""
    stream = values.width
    outer = outer or values.width
    count = values.number(*EXPERTS)
    of_token = (
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_k",
        "moe_topk",
    )
    chosen = values.number(*of_token)
    wide = (2 if gated else 1) * width
    biases = wide + outer
    return Layer(
        (
            Matrix("router", stream, count),
            Matrix("experts", outer, wide, count, chosen),
            Matrix("experts back", width, outer, count, chosen),
        ),
        vectors=(count + count * biases) * bias,
        idle_vectors=(count - chosen) * biases * bias,
        kept=chosen * (outer + wide + width + outer + 4 * width * bias),
    )
