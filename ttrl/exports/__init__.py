"""Hand trained models to others: the hub (`ttrl push`), llama.cpp and Ollama (`ttrl export`)."""
