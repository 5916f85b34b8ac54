"""Care of stored runs: repair, export, compaction."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
import xarray as xr
from tests.study.bits import unequal_bits
from tests.study.toys import Averages, Walk

from manyheads.errors import ExtraMissing, FileRefused, UsageError
from manyheads.study import open_run, run
from manyheads.study.execution import export as exporting
from manyheads.study.execution.export import export
from manyheads.study.execution.runner import require_same_versions
from manyheads.study.store.disk import write_signed
from manyheads.study.store.equality import differences
from manyheads.study.store.leases import AtWork, Launch
from manyheads.study.store.records.segments import Frame, SegmentWriter
from manyheads.study.store.repair import repair
from manyheads.study.store.run_store import RunStore, StoreDamaged


@pytest.fixture(scope="module")
def good(tmp_path_factory, seed):
    """Return a finished run: 3 draws of the prediction and 4 units."""
    return RunStore(run(Walk(), 2, seed, store=tmp_path_factory.mktemp("good"), progress=False).attrs["path"])


@pytest.fixture
def finished(good, tmp_path):
    """Return a copy, its units in one table."""
    return RunStore(shutil.copytree(good.path, tmp_path / "store/toy/walk" / good.path.name))


@pytest.fixture
def at_work(finished):
    """Return the same with its units in one segment."""
    packs, units, environments = finished.load(), finished.index.units, finished.index.environments
    writer = SegmentWriter(finished.path, finished.run, "launch-test")
    for pack in packs:
        for number, row in zip(pack.numbers.tolist(), pack.matrix, strict=True):
            writer.append(Frame(number, environments[units[number].environment], pack.schema.data, row.tobytes()))
    writer.close()
    for path in (*finished.path.glob("table-*"), finished.path / "summary.json"):
        path.unlink()
    return RunStore(finished.path)


def flip(line, mark):
    """Change one bit of the byte behind a mark."""
    place = line.index(mark) + len(mark)
    return line[:place] + bytes([line[place] ^ 1]) + line[place + 1 :]


def places(lines, kind):
    return [place for place, line in enumerate(lines) if line.startswith(b'{"kind":"%s"' % kind)]


def unit_bit(lines):
    place = places(lines, b"unit")[1]
    return [*lines[:place], flip(lines[place], b'"data":"'), *lines[place + 1 :]], {json.loads(lines[place])["unit"]}, 0


def environment_bit(lines):
    (place,) = places(lines, b"environment")
    return [*lines[:place], flip(lines[place], b'"pytho'), *lines[place + 1 :]], set(), 0


def schema_bit(lines):
    place = places(lines, b"schema")[-1]
    schema = json.loads(lines[place])["id"]
    records = [json.loads(lines[unit]) for unit in places(lines, b"unit")]
    lost = {record["unit"] for record in records if record["schema"] == schema}
    return [*lines[:place], flip(lines[place], b'"attr'), *lines[place + 1 :]], lost, 0


def bytes_missing(lines):
    """Cut from the middle of one unit's line to the middle of the next one's."""
    first, second = places(lines, b"unit")[:2]
    joined = lines[first][: len(lines[first]) // 2] + lines[second][len(lines[second]) // 2 :]
    return (
        [*lines[:first], joined, *lines[second + 1 :]],
        {json.loads(lines[place])["unit"] for place in (first, second)},
        0,
    )


def garbage(lines):
    return [*lines[:3], b"[[[[\n", b'{"kind": "code"}\n', b"\xff\x00\n", b"3\n", *lines[3:]], set(), 4


def no_start(lines):
    return lines[1:], set(), 0


@pytest.mark.parametrize("damage", [unit_bit, environment_bit, schema_bit, bytes_missing, garbage, no_start])
def test_repair_keeps_the_good_units_of_a_segment(at_work, good, seed, damage):
    (file,) = at_work.path.glob("segments/*")
    lines = file.read_bytes().splitlines(keepends=True)
    changed, lost, nameless = damage(lines)
    broken = b"".join(changed)
    file.write_bytes(broken)
    with pytest.raises(StoreDamaged, match="manyheads runs repair"):
        RunStore(at_work.path).verify()
    (found,) = repair(at_work.path)
    assert set(found.lost) <= lost  # of two units in one damaged line one is named
    assert bool(found.lost) == bool(lost)
    assert (found.kept, found.nameless) == (7 - len(lost), nameless)
    assert found.path.read_bytes() == broken
    kept = RunStore(at_work.path)
    assert kept.verify() == 7 - len(lost)
    for number in kept.numbers():
        assert unequal_bits(kept.read(kept.layout.unit(number)), good.read(good.layout.unit(number))) == []
    assert repair(at_work.path) == []
    assert differences(run(Walk(), 2, seed, store=at_work.path.parents[2], progress=False), open_run(good.path)) == []
    assert found.path.exists()


def test_a_segment_that_ends_in_the_middle_is_no_damage(at_work):
    (file,) = at_work.path.glob("segments/*")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    before = contents(at_work.path)
    assert repair(at_work.path) == []
    assert contents(at_work.path) == before


def contents(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_one_file_stands_in_for_the_schema_of_another(at_work, good):
    (file,) = at_work.path.glob("segments/*")
    lines = file.read_bytes().splitlines(keepends=True)
    file.with_name(f"0-other{file.suffix}").write_bytes(b"".join(lines))
    changed, _, _ = schema_bit(lines)
    file.write_bytes(b"".join(changed))
    (found,) = repair(at_work.path)
    assert (found.kept, found.lost) == (7, [])
    assert RunStore(at_work.path).verify() == 7


def test_repair_keeps_the_good_units_of_a_table(finished, good, seed):
    (table,) = finished.path.glob("table-*")
    content = table.read_bytes()
    pack = max(finished.load(), key=lambda pack: pack.schema.size)
    victim = int(pack.numbers[-1])
    values = max((each for _, each in pack.schema.arrays(pack.matrix) if each.dtype.kind == "f"), key=np.size)
    value = values[-1].ravel()[-1:].tobytes()
    assert content.count(value) == 1
    table.write_bytes(content.replace(value, bytes([value[0] ^ 1]) + value[1:]))
    (found,) = repair(finished.path)
    assert (found.kept, found.lost, found.nameless) == (6, [victim], 0)
    kept = RunStore(finished.path)
    assert kept.numbers() == set(range(7)) - {victim}
    for number in kept.numbers():
        assert unequal_bits(kept.read(kept.layout.unit(number)), good.read(good.layout.unit(number))) == []
    assert differences(run(Walk(), 2, seed, store=finished.path.parents[2], progress=False), open_run(good.path)) == []
    assert [path.name for path in finished.path.glob("table-*.zip")] != [table.name]


@pytest.mark.slow
def test_repair_of_a_table_with_any_byte_changed_gives_no_other_data(finished, good):
    (table,) = finished.path.glob("table-*")
    content, kept = table.read_bytes(), 0
    for position in range(0, len(content), 197):
        path = shutil.copytree(finished.path, finished.path.parent / str(position))
        (path / table.name).write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        assert len(repair(path)) == 1
        after = RunStore(path)
        for number in after.numbers():
            unit = after.layout.unit(number)
            assert unequal_bits(after.read(unit), good.read(unit)) == []
        kept += len(after.numbers())
        shutil.rmtree(path)
    assert kept


def test_a_table_that_cannot_be_read_loses_all(finished, good, seed):
    (table,) = finished.path.glob("table-*")
    table.write_bytes(table.read_bytes()[:-100])
    (found,) = repair(finished.path)
    assert (found.kept, found.lost, found.nameless) == (0, [], None)
    assert found.path.exists()
    assert differences(run(Walk(), 2, seed, store=finished.path.parents[2], progress=False), open_run(good.path)) == []


def test_repair_refuses_a_run_at_work_and_leaves_a_good_one_untouched(finished):
    before = contents(finished.path)
    assert repair(finished.path) == []
    assert contents(finished.path) == before
    (table,) = finished.path.glob("table-*")
    table.write_bytes(b"broken")
    with Launch(finished.path), pytest.raises(AtWork, match="repair it when it has ended"):
        repair(finished.path)
    assert table.exists()


def test_repair_refuses_newer_files_and_older_runs(at_work):
    (file,) = at_work.path.glob("segments/*")
    file.write_bytes(file.read_bytes().replace(b'"format":2', b'"format":3'))
    with pytest.raises(FileRefused, match="newer manyheads"):
        repair(at_work.path)
    assert file.exists()
    header = json.loads((at_work.path / "run.json").read_text())
    del header["sha256"], header["format"]
    write_signed(at_work.path / "run.json", header)
    with pytest.raises(FileRefused, match="format 1, which is no longer read"):
        repair(at_work.path)


def unequal(ours, theirs, suffix):
    """Compare an exported dataset; netCDF has texts without a length, and attributes that are numbers or texts."""
    for name, variable in theirs.variables.items():
        if variable.dtype == object:
            kept = (variable.dims, variable.values.astype(str), variable.attrs)
            theirs = theirs.assign_coords({name: kept}) if name in theirs.coords else theirs.assign({name: kept})
    if suffix == ".nc":
        for each in (ours, *ours.variables.values()):
            each.attrs = exporting._plain(each.attrs)
    return unequal_bits(ours, theirs)


@pytest.fixture
def _netcdf(suffix):
    if suffix == ".nc" and not any(map(importlib.util.find_spec, exporting.NETCDF)):
        pytest.skip("no package that writes netCDF with groups is installed")


@pytest.mark.usefixtures("_netcdf")
@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
def test_every_type_survives_the_export(good, tmp_path, monkeypatch, suffix):
    other_nan = np.array([0x7FF8_0000_0000_0001], np.uint64).view(float)
    values = {
        "zero": np.array([-0.0, -0.0]),
        "nan": np.array([*other_nan, np.inf]),
        "single": np.array([np.nan, -0.0], np.float32),
        "integer": np.array([2**63 - 1, -(2**63)]),
        "byte": np.array([0, 255], np.uint8),
        "truth": np.array([True, False]),
        "text": np.array(["é", ""]),
    }
    variables = {name: ("i", value, {"units": "1", "deterministic": False}) for name, value in values.items()}
    attributes = {"truth": True, "large": 2**80, "number": 0.1, "text": "é"}
    made = xr.DataTree.from_dict({"/": xr.Dataset(), "a": xr.Dataset(variables, {"i": ["x", "y"]}, attributes)})
    monkeypatch.setattr(exporting, "open_run", lambda _: made.copy(deep=True))
    out = tmp_path / f"all{suffix}"
    export(good.path, out)
    with xr.open_datatree(out, engine="zarr" if suffix == ".zarr" else exporting._engine()) as back:
        assert unequal(made["a"].to_dataset(), back["a"].load().to_dataset(), suffix) == []
    made["a"]["wide"] = xr.DataArray(np.array([1j, -0.0]), dims="i")
    if suffix == ".nc":
        with pytest.raises(UsageError, match="a/wide is complex128"):
            export(good.path, tmp_path / "wide.nc")
        assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.usefixtures("_netcdf")
@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
def test_an_exported_run_is_read_back_to_the_bit(good, tmp_path, suffix):
    out = tmp_path / f"walk{suffix}"
    export(good.path, out)
    with xr.open_datatree(out, engine="zarr" if suffix == ".zarr" else exporting._engine()) as back:
        back.load()
    tree = open_run(good.path)
    assert dict(back.attrs) == dict(tree.attrs)
    assert {node.path for node in back.subtree} == {node.path for node in tree.subtree}
    for node in tree.subtree:
        assert unequal(node.to_dataset(), back[node.path].to_dataset(), suffix) == []
    with pytest.raises(UsageError, match="exists"):
        export(good.path, out)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_what_cannot_be_exported_is_refused_by_name(good, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "NETCDF", {"no_such_package": ""})
    with pytest.raises(ExtraMissing, match="pip install h5netcdf"):
        export(good.path, tmp_path / "walk.nc")
    with pytest.raises(UsageError, match=r"ends in \.zarr or \.nc"):
        export(good.path, tmp_path / "walk.csv")
    with pytest.raises(UsageError, match="folder of one run"):
        export(good.path.parent, tmp_path / "walk.zarr")
    assert not list(tmp_path.iterdir())


def test_other_versions_are_refused_when_asked(tmp_path, monkeypatch):
    require_same_versions(Averages(), 0, tmp_path)  # nothing is stored
    store = RunStore.create(tmp_path, Averages(), 0)
    require_same_versions(Averages(), 0, tmp_path)
    from manyheads.study.store.provenance import versions
    from manyheads.study.store.records.schema import pack

    writer, unit = SegmentWriter(store.path, store.run, "launch-test"), xr.Dataset({"x": ((), np.float64(1))})
    writer.append(Frame(0, versions(), *pack(unit)))
    require_same_versions(Averages(), 0, tmp_path)
    writer.append(Frame(1, versions() | {"jax": "0.0.1"}, *pack(unit)))
    writer.close()
    with pytest.raises(UsageError, match=r"units come from jax 0\.0\.1; here is .*jax \d"):
        require_same_versions(Averages(), 0, tmp_path)
