"""The registry's models that are quadratic in W for all W; f and A are in `formulas`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nqflib.zoo import formulas
from nqflib.zoo.citations import cite
from nqflib.zoo.model import Instance, SolvableModel

_SAMPLES = 4

_Draw = Callable[[torch.Generator], Tensor]


def _normal(*shape: int) -> _Draw:
    return lambda generator: torch.randn(_SAMPLES, *shape, generator=generator, dtype=torch.float64)


def _one_hot(size: int) -> _Draw:
    return lambda generator: torch.eye(size, dtype=torch.float64)[torch.randint(size, (_SAMPLES,), generator=generator)]


def _symmetric_normal(size: int) -> _Draw:
    draw = _normal(size, size)
    return lambda generator: formulas.symmetric(draw(generator))


def _instance(p: int, d: int, inputs: tuple[_Draw, ...]) -> Callable[[torch.Generator], Instance]:
    def sample(generator: torch.Generator) -> Instance:
        W = torch.randn(p, d, generator=generator, dtype=torch.float64)
        return Instance(W, tuple(draw(generator) for draw in inputs))

    return sample


def _exact(
    number: int,
    name: str,
    title: str,
    f: Callable[..., Tensor],
    A: Callable[..., Tensor],
    sizes: tuple[int, int],
    inputs: tuple[_Draw, ...],
    keys: tuple[str, ...],
    **words: Any,
) -> SolvableModel:
    """An entry with weights (p, d) = `sizes` and bibliography `keys`; `words` are formula, structure, units, ..."""
    sample = _instance(*sizes, inputs)
    return SolvableModel(
        number, name, title, f=f, A=A, exactness="exact", sample=sample, citations=cite(*keys), **words
    )


_FACTORS = r"\frac12\begin{bmatrix}0 & %s\\ %s & 0\end{bmatrix}"
_LATENT = "latent dimensions: column k of U above column k of V"

EXACT: tuple[SolvableModel, ...] = (
    _exact(
        1, "psd_matrix_sensing", "Positive semi-definite matrix sensing",
        lambda W, S: torch.einsum("nab,ai,bi->n", S, W, W).unsqueeze(1),
        lambda S: formulas.symmetric(S).unsqueeze(1),
        (5, 3), (_normal(5, 5),), ("gunasekar2017implicit", "stoger2021small", "xu2025fundamental"),
        formula=r"\langle S, WW^\top\rangle", structure=r"\tfrac12(S + S^\top)", units="columns of W",
    ),
    _exact(
        2, "rectangular_matrix_sensing", "Rectangular matrix sensing and factorisation",
        formulas.rectangular_f, lambda S: formulas.off_diagonal(S).unsqueeze(1),
        (7, 3), (_normal(3, 4),), ("gunasekar2017implicit", "arora2019implicit", "xu2025fundamental"),
        formula=r"\langle S, UV^\top\rangle", structure=_FACTORS % ("S", r"S^\top"), units=_LATENT,
    ),
    _exact(
        3, "matrix_completion", "Matrix completion: one entry of a ratings matrix",
        formulas.bilinear_f, formulas.bilinear_A,
        (9, 3), (_one_hot(4), _one_hot(5)), ("koren2009matrix", "ge2016matrix"),
        formula=r"u_i^\top v_j", structure=_FACTORS % (r"e_ie_j^\top", r"e_je_i^\top"), units=_LATENT,
    ),
    _exact(
        4, "word_context_score", "Word-context score of embeddings",
        formulas.bilinear_f, formulas.bilinear_A,
        (10, 2), (_one_hot(5), _one_hot(5)), ("mikolov2013distributed", "goldberg2014word2vec"),
        formula=r"u_w^\top v_c", structure=_FACTORS % (r"e_we_c^\top", r"e_ce_w^\top"), units=_LATENT,
    ),
    _exact(
        5, "quadratic_network", "Quadratic network",
        formulas.square_f, formulas.square_A,
        (4, 5), (_normal(4),),
        ("radhakrishnan2024mechanism", "zhu2024quadratic", "defilippis2026scaling", "saraomannelli2020optimization"),
        formula=r"\sum_r (w_r^\top x)^2", structure=r"xx^\top", units="hidden units w_r",
    ),
    _exact(
        6, "phase_retrieval", "Phase retrieval (one unit in the classical problem)",
        lambda W, a: torch.einsum("na,ai,bi,nb->n", a, W, W, a).unsqueeze(1), formulas.square_A,
        (4, 1), (_normal(4),), ("candes2015wirtinger", "maillard2020phase"),
        formula=r"a^\top WW^\top a", structure=r"aa^\top", units="columns of W",
    ),
    _exact(
        7, "diagonal_network_square", "Diagonal linear network, squares (one unit in the classical problem)",
        lambda W, x: 0.25 * (x @ W.square()).sum(1, keepdim=True),
        lambda x: 0.25 * torch.diag_embed(x).unsqueeze(1),
        (5, 1), (_normal(5),), ("berthier2023incremental", "pesme2021implicit"),
        formula=r"\tfrac14\sum_k x_k u_k^2", structure=r"\tfrac14\,\mathrm{Diag}(x)", units="copies of the network",
    ),
    _exact(
        8, "diagonal_network_two_factor", "Diagonal linear network, two factors (one unit in the classical problem)",
        formulas.two_factor_diagonal_f, lambda x: formulas.off_diagonal(torch.diag_embed(x)).unsqueeze(1),
        (8, 1), (_normal(4),), ("even2023sgd", "pesme2021implicit"),
        formula=r"u^\top\mathrm{Diag}(x)\,v", structure=_FACTORS % (r"\mathrm{Diag}(x)", r"\mathrm{Diag}(x)"),
        units="copies of the network",
    ),
    _exact(
        14, "tied_query_key", "Logit of attention with tied query and key",
        formulas.tied_f, formulas.tied_A,
        (4, formulas.KEY_DIM), (_normal(4), _normal(6, 4), _normal(4)),
        ("pan2024dissecting", "boncoraglio2026single"),
        formula=r"u^\top W^\top W x/\sqrt{d_k},\;u=\Sigma_X c", structure=r"\frac{1}{2\sqrt{d_k}}(xu^\top + ux^\top)",
        units="ROWS of W in the source, M = W^T W; W here is the transpose, one column per key channel",
    ),
    _exact(
        15, "bilinear_sequence_regression", "Bilinear sequence regression: one pair of tokens",
        formulas.bilinear_f, formulas.bilinear_A,
        (8, 3), (_normal(4), _normal(4)),
        ("srebro2004maximum", "gunasekar2017implicit", "erba2025bilinear"),
        formula=r"x_s^\top UV^\top x_t", structure=_FACTORS % (r"x_sx_t^\top", r"x_tx_s^\top"), units=_LATENT,
    ),
    _exact(
        16, "linear_ssl_augmentation", "Linear self-supervised learning: spread of an augmentation",
        lambda W, x, chi: formulas.square_f(W, x - chi), lambda x, chi: formulas.square_A(x - chi),
        (4, 3), (_normal(4), _normal(4)), ("vonkugelgen2021self", "bardes2022vicreg", "ziyin2023what"),
        formula=r"\|W\Delta\|^2,\;\Delta = x-\chi", structure=r"\Delta\Delta^\top",
        units="ROWS of W in the source, M = W^T W; W here is the transpose, one column per embedding coordinate",
    ),
    _exact(
        18, "two_layer_linear", "Two-layer linear network",
        formulas.two_layer_linear_f, formulas.two_layer_linear_A(formulas.OUTPUTS),
        (4 + formulas.OUTPUTS, 3), (_normal(4),), ("saxe2014exact",),
        formula=r"(Z_2Z_1^\top x)_m", structure=_FACTORS % (r"xe_m^\top", r"e_mx^\top"),
        units="hidden units (row of Z_1^T, column of Z_2)",
    ),
    _exact(
        19, "diagonal_network_difference", "Diagonal linear network, difference of squares (one unit classically)",
        formulas.difference_diagonal_f,
        lambda x: torch.diag_embed(torch.cat([x, -x], 1)).unsqueeze(1),
        (8, 1), (_normal(4),), ("woodworth2020kernel",),
        formula=r"\sum_k x_k(u_k^2 - v_k^2)", structure=r"\mathrm{Diag}(x)\oplus(-\mathrm{Diag}(x))",
        units="copies of the network",
    ),
    _exact(
        20, "quadratic_word_embedding", "Quadratic word embedding, words and contexts tied",
        lambda W, i, j: ((i @ W) * (j @ W)).sum(1, keepdim=True),
        lambda i, j: formulas.symmetric(formulas.outer(i, j)).unsqueeze(1),
        (4, 3), (_one_hot(4), _one_hot(4)), ("karkada2025closed",),
        formula=r"w_i^\top w_j", structure=r"\tfrac12(e_ie_j^\top + e_je_i^\top)", units="embedding coordinates",
    ),
    _exact(
        21, "linear_contrastive_embedding", "Linear joint embedding: cross-correlation of two views",
        formulas.embedding_f, formulas.embedding_A,
        (4 * formulas.EMBEDDING, 1), (_normal(6, 4), _normal(6, 4)), ("simon2023stepwise",),
        formula=r"(W\Gamma W^\top)_{kl},\;\Gamma=\tfrac12\mathbb{E}[xx'^\top + x'x^\top]",
        structure=r"\tfrac12(e_ke_l^\top + e_le_k^\top)\otimes\Gamma",
        units="the whole embedding is one unit: its entry (k, l) singles out two coordinates", exchangeable=False,
    ),
    _exact(
        22, "merged_linear_attention", "Linear attention with merged key and query",
        formulas.merged_attention_f, formulas.merged_attention_A,
        (3 * 3 + 1, 3), (_normal(5, 3), _normal(5), _normal(3)), ("zhang2025training",),
        formula=r"\sum_h v_h\,\beta^\top U_h x,\;\beta=\tfrac1N\sum_i y_ix_i",
        structure=_FACTORS % (r"\varphi", r"\varphi^\top") + r",\;\varphi=\mathrm{vec}(\beta x^\top)",
        units="heads (vec U_h, v_h)",
    ),
    _exact(
        23, "quadratic_network_extensive", "Quadratic network wider than its input, for a quadratic teacher",
        formulas.square_f, formulas.square_A,
        (4, 9), (_normal(4),), ("maillard2024bayes", "benarous2025learning"),
        formula=r"\sum_r (w_r^\top x)^2", structure=r"xx^\top", units="hidden units w_r",
    ),
    _exact(
        24, "factorization_machine", "Factorisation machine, pairwise part",
        formulas.factorization_machine_f, formulas.factorization_machine_A,
        (5, 3), (_normal(5),), ("rendle2010factorization",),
        formula=r"\sum_{i<j}\langle v_i, v_j\rangle x_ix_j", structure=r"\tfrac12(xx^\top - \mathrm{Diag}(x^2))",
        units="latent dimensions: columns of the matrix with rows v_i",
    ),
    _exact(
        25, "low_rank_adapter", "Low-rank adapter: one output direction",
        lambda W, x_out, x_in: torch.einsum("na,ar,br,nb->n", x_out, W[:3], W[3:], x_in).unsqueeze(1),
        formulas.bilinear_A, (8, 2), (_normal(3), _normal(5)), ("hu2021lora",),
        formula=r"x_o^\top BA\,x_i", structure=_FACTORS % (r"x_ox_i^\top", r"x_ix_o^\top"),
        units="ranks: column r of B above row r of A",
    ),
    _exact(
        26, "blind_deconvolution", "Blind deconvolution (one unit in the classical problem)",
        formulas.bilinear_f, formulas.bilinear_A,
        (7, 1), (_normal(3), _normal(4)), ("ahmed2014blind", "li2019rapid"),
        formula=r"(b^\top u)(c^\top v)", structure=_FACTORS % (r"bc^\top", r"cb^\top"), units="pairs (u, v)",
    ),
    _exact(
        27, "burer_monteiro", "Low-rank factorisation of a semidefinite program; principal components",
        lambda W, C: (C @ W * W).sum((1, 2)).unsqueeze(1), lambda C: C.unsqueeze(1),
        (5, 2), (_symmetric_normal(5),), ("burer2003nonlinear", "oja1982simplified"),
        formula=r"\langle C, WW^\top\rangle,\;C=C^\top", structure="C", units="columns of W",
    ),
    _exact(
        28, "linear_autoencoder", "Linear autoencoder: one reconstructed coordinate",
        formulas.two_layer_linear_f, formulas.two_layer_linear_A(None),
        (8, 3), (_normal(4),), ("baldi1989neural",),
        formula=r"(W_1W_2^\top x)_m", structure=_FACTORS % (r"xe_m^\top", r"e_mx^\top"),
        units="code units: column of W_2 above column of W_1",
    ),
    _exact(
        31, "averaging_attention", "Attention head that averages its tokens, value and readout trained",
        formulas.averaging_attention_f, formulas.averaging_attention_A,
        (4 * formulas.VALUE_DIM + formulas.VALUE_DIM, 2), (_normal(6, 4),), ("ziyin2026nqf",),
        formula=r"\sum_i v_i^\top W_i^V x_{\rm avg}",
        structure=_FACTORS % (r"x_{\rm avg}\otimes I_{d_v}", r"x_{\rm avg}^\top\otimes I_{d_v}"),
        units="heads (W^V, v)",
    ),
)  # fmt: skip
