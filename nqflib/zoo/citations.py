"""The works cited by the registry of solvable models: author, year and title under a BibTeX key."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Citation:
    """A work by its BibTeX `key`, `authors` as they are to be printed, `year` and `title`."""

    key: str
    authors: str
    year: int
    title: str

    def __str__(self) -> str:
        return f"{self.authors} ({self.year}), {self.title}"


_WORKS = (
    ("ziyin2026nqf", "Ziyin, Xu, Poggio and Chuang", 2026,
     "Neural Quadratic Forms: A Unified Minimal Model for Sudden Learning and Scaling Laws"),
    ("ahmed2014blind", "Ahmed, Recht and Romberg", 2014, "Blind deconvolution using convex programming"),
    ("arora2019implicit", "Arora, Cohen, Hu and Luo", 2019, "Implicit regularization in deep matrix factorization"),
    ("baldi1989neural", "Baldi and Hornik", 1989,
     "Neural networks and principal component analysis: Learning from examples without local minima"),
    ("bardes2022vicreg", "Bardes, Ponce and LeCun", 2022,
     "VICReg: Variance-invariance-covariance regularization for self-supervised learning"),
    ("benarous2025learning", "Ben Arous, Erdogdu, Vural and Wu", 2025,
     "Learning quadratic neural networks in high dimensions: SGD dynamics and scaling laws"),
    ("berthier2023incremental", "Berthier", 2023, "Incremental learning in diagonal linear networks"),
    ("boncoraglio2026single", "Boncoraglio, Erba, Troiani, Xu, Krzakala and Zdeborová", 2026,
     "Single-head attention in high dimensions: A theory of generalization, weights spectra, and scaling laws"),
    ("burer2003nonlinear", "Burer and Monteiro", 2003,
     "A nonlinear programming algorithm for solving semidefinite programs via low-rank factorization"),
    ("candes2015wirtinger", "Candès, Li and Soltanolkotabi", 2015,
     "Phase retrieval via Wirtinger flow: Theory and algorithms"),
    ("cao2019tight", "Cao and Gu", 2019,
     "Tight sample complexity of learning one-hidden-layer convolutional neural networks"),
    ("defilippis2026scaling", "Defilippis, Xu, Girardin, Erba, Troiani, Zdeborová, Loureiro and Krzakala", 2026,
     "Scaling laws and spectra of shallow neural networks in the feature learning regime"),
    ("du2018gradient", "Du, Lee, Tian, Singh and Póczos", 2018,
     "Gradient descent learns one-hidden-layer CNN: Don't be afraid of spurious local minima"),
    ("erba2025bilinear", "Erba, Troiani, Biggio, Maillard and Zdeborová", 2025,
     "Bilinear sequence regression: A model for learning from long sequences of high-dimensional tokens"),
    ("even2023sgd", "Even, Pesme, Gunasekar and Flammarion", 2023,
     "(S)GD over diagonal linear networks: Implicit bias, large stepsizes and edge of stability"),
    ("fukumizu1996regularity", "Fukumizu", 1996,
     "A regularity condition of the information matrix of a multilayer perceptron network"),
    ("ge2016matrix", "Ge, Lee and Ma", 2016, "Matrix completion has no spurious local minimum"),
    ("goldberg2014word2vec", "Goldberg and Levy", 2014,
     "word2vec explained: Deriving Mikolov et al.'s negative-sampling word-embedding method"),
    ("gunasekar2017implicit", "Gunasekar, Woodworth, Bhojanapalli, Neyshabur and Srebro", 2017,
     "Implicit regularization in matrix factorization"),
    ("hu2021lora", "Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang and Chen", 2021,
     "LoRA: Low-rank adaptation of large language models"),
    ("karkada2025closed", "Karkada, Simon, Bahri and DeWeese", 2025,
     "Closed-form training dynamics reveal learned features and linear structure in word2vec-like models"),
    ("koren2009matrix", "Koren, Bell and Volinsky", 2009, "Matrix factorization techniques for recommender systems"),
    ("krizhevsky2012imagenet", "Krizhevsky, Sutskever and Hinton", 2012,
     "ImageNet classification with deep convolutional neural networks"),
    ("li2019rapid", "Li, Ling, Strohmer and Wei", 2019,
     "Rapid, robust, and reliable blind deconvolution via nonconvex optimization"),
    ("maillard2020phase", "Maillard, Loureiro, Krzakala and Zdeborová", 2020,
     "Phase retrieval in high dimensions: Statistical and computational phase transitions"),
    ("maillard2024bayes", "Maillard, Troiani, Martin, Krzakala and Zdeborová", 2024,
     "Bayes-optimal learning of an extensive-width neural network from quadratically many samples"),
    ("maulensoto2025attention", "Maulen Soto, Marion and Boyer", 2025, "Attention-based clustering"),
    ("mikolov2013distributed", "Mikolov, Sutskever, Chen, Corrado and Dean", 2013,
     "Distributed representations of words and phrases and their compositionality"),
    ("nguyen2024sigmoid", "Nguyen, Ho and Rinaldo", 2024,
     "Sigmoid gating is more sample efficient than softmax gating in mixture of experts"),
    ("oja1982simplified", "Oja", 1982, "Simplified neuron model as a principal component analyzer"),
    ("pan2024dissecting", "Pan, Philip, Xie and Schwartz", 2024,
     "Dissecting query-key interaction in vision transformers"),
    ("pesme2021implicit", "Pesme, Pillaud-Vivien and Flammarion", 2021,
     "Implicit bias of SGD for diagonal linear networks: A provable benefit of stochasticity"),
    ("radhakrishnan2024mechanism", "Radhakrishnan, Beaglehole, Pandit and Belkin", 2024,
     "Mechanism for feature learning in neural networks and backpropagation-free machine learning models"),
    ("rendle2010factorization", "Rendle", 2010, "Factorization machines"),
    ("saraomannelli2020optimization", "Sarao Mannelli, Vanden-Eijnden and Zdeborová", 2020,
     "Optimization and generalization of shallow neural networks with quadratic activation functions"),
    ("saxe2014exact", "Saxe, McClelland and Ganguli", 2014,
     "Exact solutions to the nonlinear dynamics of learning in deep linear neural networks"),
    ("shazeer2017outrageously", "Shazeer, Mirhoseini, Maziarz, Davis, Le, Hinton and Dean", 2017,
     "Outrageously large neural networks: The sparsely-gated mixture-of-experts layer"),
    ("simon2023stepwise", "Simon, Knutins, Ziyin, Geisz, Fetterman and Albrecht", 2023,
     "On the stepwise nature of self-supervised learning"),
    ("srebro2004maximum", "Srebro, Rennie and Jaakkola", 2004, "Maximum-margin matrix factorization"),
    ("stoger2021small", "Stöger and Soltanolkotabi", 2021,
     "Small random initialization is akin to spectral learning: Optimization and generalization guarantees for "
     "overparameterized low-rank matrix reconstruction"),
    ("tarzanagh2023max", "Ataee Tarzanagh, Li, Zhang and Oymak", 2023,
     "Max-margin token selection in attention mechanism"),
    ("vaswani2017attention", "Vaswani, Shazeer, Parmar, Uszkoreit, Jones, Gomez, Kaiser and Polosukhin", 2017,
     "Attention is all you need"),
    ("vonkugelgen2021self", "von Kügelgen, Sharma, Gresele, Brendel, Schölkopf, Besserve and Locatello", 2021,
     "Self-supervised learning with data augmentations provably isolates content from style"),
    ("woodworth2020kernel", "Woodworth, Gunasekar, Lee, Moroshko, Savarese, Golan, Soudry and Srebro", 2020,
     "Kernel and rich regimes in overparametrized models"),
    ("xu2025fundamental", "Xu, Maillard, Zdeborová and Krzakala", 2025,
     "Fundamental limits of matrix sensing: Exact asymptotics, universality, and applications"),
    ("zhang2025training", "Zhang, Singh, Latham and Saxe", 2025,
     "Training dynamics of in-context learning in linear attention"),
    ("zhu2024quadratic", "Zhu, Liu, Radhakrishnan and Belkin", 2024,
     "Quadratic models for understanding catapult dynamics of neural networks"),
    ("ziyin2023what", "Ziyin, Lubana, Ueda and Tanaka", 2023,
     "What shapes the loss landscape of self-supervised learning?"),
)  # fmt: skip

CITATIONS: dict[str, Citation] = {work[0]: Citation(*work) for work in _WORKS}


def cite(*keys: str) -> tuple[Citation, ...]:
    """The citations under `keys`. Raises `KeyError` for a key that is not in the list."""
    return tuple(CITATIONS[key] for key in keys)
