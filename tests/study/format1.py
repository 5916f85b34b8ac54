"""Writer of format 1, frozen as it was: tests and measurements rewrite runs in it, and the library reads it."""

import shutil

import numpy as np

from manyheads.study.store.disk import hash_files, write_json, write_signed
from manyheads.study.store.run_store import RunStore


def downgrade(path):
    """Rewrite a run in format 1 and return its folder."""
    runs = RunStore(path)
    for number in sorted(runs.numbers()):
        unit = runs.layout.unit(number)
        write_unit(runs.folders.unit_path(unit), runs.read(unit), f"{runs.header['study']} {runs.run}, {unit}")
    header = {name: value for name, value in runs.header.items() if name not in ("format", "settings")}
    write_signed(runs.path / "run.json", header | {"units": "named"})
    for table in runs.path.glob("table-*"):
        table.unlink()
    for folder in ("segments", "leases"):
        shutil.rmtree(runs.path / folder, ignore_errors=True)
    return runs.path


def write_unit(folder, dataset, name):
    """Write one unit: a Zarr group, and the sha256 of each of its files."""
    temporary = folder.with_name(f".{folder.name}.new")
    temporary.mkdir(parents=True)
    named = encode_texts(dataset).assign_attrs({"manyheads_unit": name})
    named.to_zarr(temporary / "data.zarr", mode="w-", zarr_format=3, consolidated=False)
    write_json(temporary / "manifest.json", hash_files(temporary, but="manifest.json"))
    temporary.rename(folder)


def encode_texts(dataset):
    """Replace texts by integer codes, with the texts as an attribute."""
    coded = {}
    for name, variable in dataset.variables.items():
        if variable.dtype.kind in "OUT":
            texts, codes = np.unique(np.asarray(variable.values, dtype=str), return_inverse=True)
            attributes = variable.attrs | {"labels": texts.tolist()}
            coded[name] = (variable.dims, codes.reshape(variable.shape).astype(np.int32), attributes)
    return dataset.assign_coords({name: value for name, value in coded.items() if name in dataset.coords}).assign(
        {name: value for name, value in coded.items() if name not in dataset.coords}
    )
