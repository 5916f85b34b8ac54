"""One hand-made file for every rule that a file can break, and no rule without such a file."""

import inspect
import json
import os
import pickle
import re

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from manyheads.errors import FileRefused, ManyheadsError
from manyheads.models import attention_weights, open_checkpoint, refusals, shape_from_config
from manyheads.models.checkpoints.tensor_file import TensorFile
from manyheads.models.parameters import parameter_roles, recognize

F4 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
EIGHT = bytes(8)
GPT2 = {"model_type": "gpt2", "n_embd": 4, "n_head": 2, "n_layer": 0, "architectures": ["GPT2LMHeadModel"]}
BODY = {"wte.weight": (5, 4), "wpe.weight": (3, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}


def entry(**changes):
    return {"w": {**F4, **changes}}


# Rule → the class, by which a caller reacts, and the sentence, by which a person knows which rule was broken.
RULES = {
    "FileTooShort": ("FileDamaged", "bytes; a safetensors file has at least 8"),
    "EmptyFile": ("FileDamaged", "0 bytes; .* was interrupted"),
    "HeaderTooLarge": ("FileDamaged", "a header of [0-9,]* bytes; at most 100,000,000"),
    "HeaderBeyondFile": ("FileDamaged", "a header of [0-9,]* bytes in a file of"),
    "PickleRefused": ("PickleRefused", "pickled|no .safetensors file"),
    "JSONEncoding": ("FileDamaged", "UTF-8"),
    "JSONSyntax": ("FileDamaged", "no JSON|NaN is no JSON number"),
    "JSONNotObject": ("FileDamaged", "the header begins with|not an object"),
    "JSONTooDeep": ("FileDamaged", "nested too deeply"),
    "JSONTooComplex": ("FileDamaged", "commas and brackets, at most"),
    "JSONTooLarge": ("FileDamaged", "more than 50,000,000 bytes"),
    "DuplicateKey": ("FileDamaged", "stands twice in one object; .* keep one"),
    "MetadataInvalid": ("FileDamaged", "__metadata__ is not a table of strings"),
    "EntryInvalid": ("FileDamaged", "not exactly dtype, shape and data_offsets"),
    "UnknownDtype": ("FileDamaged", "has dtype .* convert the file"),
    "ShapeInvalid": ("FileDamaged", "has shape"),
    "OffsetsInvalid": ("FileDamaged", "has data_offsets"),
    "OffsetsBeyondFile": ("FileDamaged", "ends at byte .* was interrupted"),
    "ByteCountMismatch": ("FileDamaged", "its offsets span"),
    "TensorsOverlap": ("FileDamaged", "bytes inside another"),
    "GapBetweenTensors": ("FileDamaged", "unclaimed bytes before"),
    "TrailingBytes": ("FileDamaged", "unclaimed bytes at the end"),
    "BooleanInvalid": ("FileDamaged", "holds the byte 2"),
    "FileMissing": ("FileMissing", "there is no such file"),
    "NullCharacter": ("FileMissing", "holds a null character"),
    "FileUnreadable": ("FileUnreadable", "cannot be opened"),
    "NotAFile": ("FileUnreadable", "is a folder|is a pipe, socket or device"),
    "SymlinkRefused": ("SymlinkRefused", "is a symbolic link to .* follow_links=True"),
    "FileChanged": ("FileChanged", "in the middle of a tensor"),
    "NoWeights": ("FileMissing", "holds neither model.safetensors nor"),
    "AmbiguousFolder": ("FileDamaged", "and the 1 shards of .* differ in w.* give the one you mean"),
    "IndexInvalid": ("FileDamaged", "weight_map is not a table"),
    "ShardOutsideFolder": ("FileDamaged", "is no plain file name"),
    "ShardMissing": ("FileMissing", "places 1 tensors in it; .* fetch the missing shard"),
    "TensorMissing": ("FileDamaged", "places 1 tensors that no shard holds, such as 'w'"),
    "ShardMismatch": ("FileDamaged", "'w' is in a.* which it names, and with other values in b"),
    "ConfigMissing": ("FileMissing", "no config.json beside the weights"),
    "ConfigInvalid": ("ConfigInvalid", "n_embd is missing|width 4 |expected a whole number|expected a positive number"),
    "UnknownFamily": ("FamilyUnknown", "model_type .* is (none of gpt2|not described: its layers keep a state)"),
    "UnexplainedNames": ("WeightsMismatch", "does not explain|none of which is among"),
    "WeightsMissing": ("WeightsMismatch", "also needs|layers in|neither stored nor tied"),
    "WeightShapeMismatch": ("WeightsMismatch", "has shape .* the configuration gives"),
    "TieBroken": ("ConfigInvalid", "are tied by the configuration and differ"),
}


def broke(refusal, rule):
    """Whether a refusal is the one of a rule: its class and its sentence."""
    name, sentence = RULES[rule.rstrip("*")]
    return type(refusal).__name__ == name and re.search(sentence, str(refusal)) is not None


# Rule broken, header, data, length given in the file (None: the true one). A star marks what the format's own library
# lets through: white space first, the later of two equal keys, further fields, more or larger dimensions than NumPy
# holds, any byte as a Boolean. Everything else it refuses as well, which is checked.
FILES = [
    ("FileTooShort", None, b"\0" * 7, None),
    ("EmptyFile", None, b"", None),
    ("HeaderTooLarge", {}, b"", 100_000_001),
    ("HeaderTooLarge", {}, b"", 2**64 - 1),
    ("HeaderBeyondFile", {}, b"", 3),
    ("HeaderBeyondFile", {}, b"", 99_999_999),
    ("PickleRefused", None, b"PK\x03\x04\x00\x00\x08\x08" + EIGHT, None),
    ("PickleRefused", None, pickle.dumps([1.0] * 9, protocol=2), None),
    ("JSONEncoding", b'{"\xff": 1}', b"", None),
    ("JSONEncoding", b'{"__metadata__": {"a": "\\ud800"}}', b"", None),
    ("JSONEncoding", json.dumps({"\ud800": F4}).encode(), EIGHT, None),
    ("JSONSyntax", b'{"w": ', b"", None),
    ("JSONSyntax", b"{} {}", b"", None),
    ("JSONSyntax", b'{"w": NaN}', b"", None),
    ("JSONNotObject", b"[]", b"", None),
    ("JSONNotObject*", b" {}", b"", None),
    ("JSONNotObject", b"", b"", None),
    ("JSONTooDeep", b'{"w": ' + b"[" * 200_000, b"", None),
    ("JSONTooDeep", b'{"a":' * 100_000, b"", None),
    ("JSONTooComplex", b'{"w": [' + b"0," * 1_100_000 + b"0]}", b"", None),
    ("DuplicateKey*", b'{"w": %b, "w": %b}' % ((json.dumps(F4).encode(),) * 2), EIGHT, None),
    ("DuplicateKey", b'{"w": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', EIGHT, None),
    ("MetadataInvalid", {"__metadata__": {"layers": 2}}, b"", None),
    ("MetadataInvalid", {"__metadata__": ["pt"]}, b"", None),
    ("EntryInvalid", {"w": [1, 2]}, b"", None),
    ("EntryInvalid", {"w": {"dtype": "F32", "shape": [2]}}, EIGHT, None),
    ("EntryInvalid*", entry(strides=[1]), EIGHT, None),
    ("UnknownDtype", entry(dtype="F4"), EIGHT, None),
    ("UnknownDtype", entry(dtype=["F32"]), EIGHT, None),
    ("ShapeInvalid", entry(shape=2), EIGHT, None),
    ("ShapeInvalid", entry(shape=[-2]), EIGHT, None),
    ("ShapeInvalid", entry(shape=[-1, -2]), EIGHT, None),
    ("ShapeInvalid", entry(shape=[2.0]), EIGHT, None),
    ("ShapeInvalid", entry(shape=[True, 2]), EIGHT, None),
    ("ShapeInvalid", entry(shape=["2"]), EIGHT, None),
    ("ShapeInvalid", entry(shape=[2**63]), EIGHT, None),
    ("ShapeInvalid", entry(shape=[2**32, 2**32, 2]), EIGHT, None),  # the product is 2 modulo 2^64
    ("ShapeInvalid*", entry(shape=[2**62, 0], data_offsets=[0, 0]), b"", None),
    ("ShapeInvalid*", entry(shape=[1] * 65 + [2]), EIGHT, None),
    ("ShapeInvalid", b'{"w": {"dtype": "U8", "shape": [%b], "data_offsets": [0, 8]}}' % (b"9" * 5000), EIGHT, None),
    ("ShapeInvalid", b'{"w": {"dtype": "U8", "shape": [-0], "data_offsets": [0, 0]}}', b"", None),
    ("OffsetsInvalid", entry(data_offsets=[0]), EIGHT, None),
    ("OffsetsInvalid", entry(data_offsets=[-8, 0]), EIGHT, None),
    ("OffsetsInvalid", entry(data_offsets=[8, 0]), EIGHT, None),
    ("OffsetsInvalid", entry(data_offsets=[0.0, 8]), EIGHT, None),
    ("OffsetsInvalid", entry(data_offsets="08"), EIGHT, None),
    ("OffsetsBeyondFile", entry(), EIGHT[:-1], None),
    ("OffsetsBeyondFile", entry(shape=[2**40], data_offsets=[0, 2**42]), EIGHT, None),
    ("ByteCountMismatch", entry(shape=[3]), EIGHT, None),
    ("ByteCountMismatch", entry(dtype="F64"), EIGHT, None),
    ("ByteCountMismatch", entry(shape=[0]), EIGHT, None),
    ("TensorsOverlap", {"v": F4, "w": F4}, EIGHT, None),
    ("TensorsOverlap", {"v": F4, "w": {**F4, "data_offsets": [4, 12]}}, EIGHT + EIGHT, None),
    ("TensorsOverlap", {"v": F4, "w": {**F4, "shape": [0], "data_offsets": [4, 4]}}, EIGHT, None),
    ("GapBetweenTensors", {"v": F4, "w": {**F4, "data_offsets": [9, 17]}}, EIGHT + b"!" + EIGHT, None),
    ("GapBetweenTensors", entry(data_offsets=[1, 9]), b"!" + EIGHT, None),
    ("TrailingBytes", entry(), EIGHT + b"!", None),
    ("TrailingBytes", {}, b"!", None),
    ("BooleanInvalid*", entry(dtype="BOOL", data_offsets=[0, 2]), b"\0\2", None),
]


@pytest.mark.parametrize(("rule", "table", "data", "length"), FILES, ids=[row[0] for row in FILES])
def test_malformed_file(craft, tmp_path, rule, table, data, length):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data) if table is None else craft(table, data, length=length)
    with pytest.raises(FileRefused) as caught:
        read_all(path)
    assert broke(caught.value, rule)
    assert str(path) in str(caught.value)
    assert caught.value.remedy in str(caught.value)
    assert len(str(caught.value)) < 1000
    if not rule.endswith("*"):
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(path.read_bytes())


def read_all(path):
    file = TensorFile(path)
    return {name: file.tensor(name) for name in file.names}


def save(folder, shapes, config=None, name="model.safetensors"):
    folder.mkdir(exist_ok=True, parents=True)
    safetensors.numpy.save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / name)
    if config is not None:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def shards(folder, placed, files):
    """A folder with an index that places tensors, and shards that hold some."""
    folder.mkdir(exist_ok=True)
    for shard, names in files.items():
        save(folder, dict.fromkeys(names, (2,)), name=shard)
    (folder / "model.safetensors.index.json").write_text(
        placed if isinstance(placed, str) else json.dumps({"metadata": {"total_size": 0}, "weight_map": placed})
    )
    return folder


def file_missing(at):
    open_checkpoint(at / "nothing.safetensors")


def file_unreadable(at):
    open_checkpoint(at / ("x" * 300 + ".safetensors"))  # a name longer than file systems allow


def null_character(at):
    open_checkpoint(f"{at}/a\0b.safetensors")


def null_character_in_a_config(at):
    shape_from_config(f"{at}/config\0.json")


def folder_for_a_file(at):
    TensorFile(at)


def pipe(at):
    os.mkfifo(at / "model.safetensors")
    open_checkpoint(at)


def link(at):
    save(at / "elsewhere", BODY)
    (at / "model.safetensors").symlink_to(at / "elsewhere" / "model.safetensors")
    open_checkpoint(at)


def linked_shard(at):
    shards(at / "a", {"v": "s.safetensors"}, {})
    save(at / "elsewhere", {"v": (2,)})
    (at / "a" / "s.safetensors").symlink_to("../elsewhere/model.safetensors")
    open_checkpoint(at / "a")


def linked_config(at):
    save(at, BODY)
    (at / "config.json").symlink_to("/etc/passwd")
    open_checkpoint(at)


def pickled_file(at):
    (at / "pytorch_model.bin").write_bytes(pickle.dumps({"w": 1}))
    open_checkpoint(at / "pytorch_model.bin")


def pickled_folder(at):
    (at / "pytorch_model.bin").write_bytes(pickle.dumps({"w": 1}))
    open_checkpoint(at)


def pickled_shard(at):
    open_checkpoint(shards(at, {"w": "pytorch_model-1.bin"}, {}))


def changed(at):
    save(at, {"w": (100,)})
    checkpoint = open_checkpoint(at)
    os.truncate(at / "model.safetensors", 200)
    checkpoint.tensor("w")


def large_config(at):
    save(at, BODY)
    with (at / "config.json").open("wb") as file:
        file.truncate(50_000_001)
    open_checkpoint(at)


def broken_config(at):
    open_checkpoint(save(at, BODY, config='{"model_type": '))


def config_with_two_widths(at):
    (at / "config.json").write_text('{"model_type": "gpt2", "n_embd": 64, "n_embd": 128}')
    shape_from_config(at)


def config_without_end(at):
    (at / "config.json").symlink_to("/dev/zero")
    shape_from_config(at)


def config_of_a_pipe(at):
    os.mkfifo(at / "config.json")
    shape_from_config(at)


def config_of_a_list(at):
    (at / "config.json").write_text('[{"model_type": "gpt2"}]')
    shape_from_config(at)


def no_weights(at):
    (at / "config.json").write_text("{}")
    open_checkpoint(at)


def ambiguous(at):
    save(at, {"w": (3,)})
    open_checkpoint(shards(at, {"w": "a.safetensors"}, {"a.safetensors": ["w"]}))


def index_without_map(at):
    open_checkpoint(shards(at, '{"metadata": {}}', {}))


def index_of_numbers(at):
    open_checkpoint(shards(at, '{"weight_map": {"w": 1}}', {}))


def escape(name):
    def act(at):
        save(at / "elsewhere", {"w": (2,)}, name="a.safetensors")
        open_checkpoint(shards(at / "here", {"w": name.format(at=at)}, {"b.safetensors": []}))

    act.__name__ = f"escape-{name}"
    return act


def missing_shard(at):
    open_checkpoint(shards(at, {"v": "a.safetensors", "w": "b.safetensors"}, {"a.safetensors": ["v"]}))


def missing_tensor(at):
    open_checkpoint(shards(at, {"v": "a.safetensors", "w": "a.safetensors"}, {"a.safetensors": ["v"]}))


def same_tensor_twice(at):
    shards(at, {"v": "b.safetensors", "w": "a.safetensors"}, {"a.safetensors": ["w"]})
    open_checkpoint(save(at, {"v": (2,), "w": (3,)}, name="b.safetensors"))


def no_config(at):
    checkpoint = open_checkpoint(save(at, BODY))
    parameter_roles(checkpoint)


def config_without_width(at):
    recognize({key: value for key, value in GPT2.items() if key != "n_embd"}, BODY)


def config_of_odd_heads(at):
    recognize({**GPT2, "n_head": 3}, BODY)


def config_of_no_heads(at):
    recognize({**GPT2, "n_head": 0}, BODY)


def config_of_true_layers(at):
    recognize({**GPT2, "n_layer": True}, BODY)


def config_of_infinite_eps(at):
    recognize({**GPT2, "layer_norm_epsilon": float("inf")}, BODY)


def unknown_family(at):
    recognize({"model_type": "mamba"}, BODY)


def unknown_without_type(at):
    recognize({"model_type": ["gpt2"]}, BODY)


def adapter(at):
    recognize(GPT2, [*BODY, "wte.lora_A.weight"])


def wrapped(at):
    recognize(GPT2, [f"_orig_mod.{name}" for name in BODY])


def two_prefixes(at):
    recognize(GPT2, [*BODY, *(f"transformer.{name}" for name in BODY)])


def more_layers(at):
    recognize(GPT2, [*BODY, "h.0.ln_1.weight"])


def fewer_layers(at):
    recognize({**GPT2, "n_layer": 3}, BODY)


def a_billion_layers(at):
    recognize({**GPT2, "n_layer": 10**9}, BODY)


def no_bias(at):
    recognize(GPT2, [name for name in BODY if name != "ln_f.bias"])


def no_unembedding(at):
    recognize({**GPT2, "tie_word_embeddings": False}, BODY)


def other_shape(at):
    shapes = {"ln_1": (4,), "attn.c_attn": (4, 12), "attn.c_proj": (4, 4), "ln_2": (4,), "mlp.c_fc": (4, 16)}
    block = {f"h.0.{name}.weight": shape for name, shape in {**shapes, "mlp.c_proj": (16, 4)}.items()}
    block |= {f"h.0.{name}.bias": (shape[-1],) for name, shape in {**shapes, "mlp.c_proj": (16, 4)}.items()}
    block["h.0.attn.c_attn.weight"] = (12, 4)
    checkpoint = open_checkpoint(save(at, {**BODY, **block}, {**GPT2, "n_layer": 1}))
    attention_weights(checkpoint, 0)


def broken_tie(at):
    arrays = {name: np.zeros(shape, np.float32) for name, shape in BODY.items()}
    safetensors.numpy.save_file({**arrays, "lm_head.weight": np.ones((5, 4), np.float32)}, at / "model.safetensors")
    checkpoint = open_checkpoint(at / "model.safetensors", config=GPT2)
    parameter_roles(checkpoint)


ACTS = [
    ("FileMissing", file_missing),
    ("FileUnreadable", file_unreadable),
    ("NullCharacter", null_character),
    ("NullCharacter", null_character_in_a_config),
    ("NotAFile", config_without_end),
    ("NotAFile", config_of_a_pipe),
    ("DuplicateKey", config_with_two_widths),
    ("JSONNotObject", config_of_a_list),
    ("NotAFile", folder_for_a_file),
    ("NotAFile", pipe),
    ("SymlinkRefused", link),
    ("SymlinkRefused", linked_shard),
    ("SymlinkRefused", linked_config),
    ("PickleRefused", pickled_file),
    ("PickleRefused", pickled_folder),
    ("PickleRefused", pickled_shard),
    ("FileChanged", changed),
    ("JSONTooLarge", large_config),
    ("JSONSyntax", broken_config),
    ("NoWeights", no_weights),
    ("AmbiguousFolder", ambiguous),
    ("IndexInvalid", index_without_map),
    ("IndexInvalid", index_of_numbers),
    ("ShardOutsideFolder", escape("../elsewhere/a.safetensors")),
    ("ShardOutsideFolder", escape("{at}/elsewhere/a.safetensors")),
    ("ShardOutsideFolder", escape("sub/../../elsewhere/a.safetensors")),
    ("ShardOutsideFolder", escape("..\\elsewhere\\a.safetensors")),
    ("ShardOutsideFolder", escape("c:a.safetensors")),
    ("ShardOutsideFolder", escape("..")),
    ("ShardOutsideFolder", escape("")),
    ("ShardOutsideFolder", escape("a\0.safetensors")),
    ("ShardMissing", missing_shard),
    ("TensorMissing", missing_tensor),
    ("ShardMismatch", same_tensor_twice),
    ("ConfigMissing", no_config),
    ("ConfigInvalid", config_without_width),
    ("ConfigInvalid", config_of_odd_heads),
    ("ConfigInvalid", config_of_no_heads),
    ("ConfigInvalid", config_of_true_layers),
    ("ConfigInvalid", config_of_infinite_eps),
    ("UnknownFamily", unknown_family),
    ("UnknownFamily", unknown_without_type),
    ("UnexplainedNames", adapter),
    ("UnexplainedNames", wrapped),
    ("UnexplainedNames", two_prefixes),
    ("UnexplainedNames", more_layers),
    ("WeightsMissing", fewer_layers),
    ("WeightsMissing", a_billion_layers),
    ("WeightsMissing", no_bias),
    ("WeightsMissing", no_unembedding),
    ("WeightShapeMismatch", other_shape),
    ("TieBroken", broken_tie),
]


@pytest.mark.parametrize(("rule", "act"), ACTS, ids=[f"{rule}-{act.__name__[:20]}" for rule, act in ACTS])
def test_refused_by_name(tmp_path, rule, act):
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with pytest.raises(FileRefused) as caught:
        act(tmp_path)
    assert broke(caught.value, rule)
    assert caught.value.remedy in str(caught.value)
    if caught.value.path.name == "config.json":
        assert "safetensors" not in caught.value.remedy
    if before is not None:
        assert set(os.listdir("/proc/self/fd")) <= before  # every file that was opened is closed again


def test_every_rule_has_a_file_and_every_class_a_rule():
    assert RULES.keys() == {row[0].rstrip("*") for row in FILES} | {row[0] for row in ACTS}
    classes = {
        name
        for name, member in inspect.getmembers(refusals, inspect.isclass)
        if issubclass(member, refusals.CheckpointRefused) and member is not refusals.CheckpointRefused
    }
    assert classes == {name for name, _ in RULES.values()}
    assert len(classes) < 10


def test_refusals_are_catchable_and_cross_processes(tmp_path):
    refusal = refusals.FileDamaged(tmp_path / "a", "a header of 9 bytes", "make it shorter")
    assert isinstance(refusal, ManyheadsError)
    assert isinstance(refusal, ValueError)
    again = pickle.loads(pickle.dumps(refusal))
    assert (type(again), str(again), again.path) == (type(refusal), str(refusal), tmp_path / "a")
    assert again.remedy == "make it shorter"


def test_links_are_followed_when_asked(tmp_path):
    save(tmp_path / "elsewhere", BODY, GPT2)
    (tmp_path / "cache").mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "cache" / name).symlink_to(f"../elsewhere/{name}")
    checkpoint = open_checkpoint(tmp_path / "cache", follow_links=True)
    assert set(checkpoint.names) == set(BODY)
    assert checkpoint.config["n_embd"] == 4
