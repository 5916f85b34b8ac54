"""Frozen dataclasses of arrays, which are pytrees of JAX as soon as JAX is imported.

JAX is never imported here. A class is registered when it is defined, called for an instance or passed to a public
function after JAX was imported; until then JAX takes an instance for a leaf.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Self, TypeAlias, TypeVar, dataclass_transform

T = TypeVar("T")
PyTree: TypeAlias = Any  # an array, or trees, lists, tuples and dictionaries of arrays

_UNREGISTERED: list[type] = []


def static(**settings: Any) -> Any:
    """Return a dataclass field that is structure: hashed and compared by JAX, never traced."""
    return dataclasses.field(metadata={"static": True}, **settings)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field, static))
class Tree:
    """Base class: every subclass is a frozen dataclass whose fields are leaves or trees, but for `static` ones.

    Checks go into `__post_init__`. JAX rebuilds instances without it, since it puts tracers and other objects in the
    place of arrays. Instances are equal if they are the same object.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        _UNREGISTERED.append(cls)
        register_trees()

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Register the classes that JAX does not know, also when an instance is unpickled."""
        register_trees()
        return super().__new__(cls)

    def __repr__(self) -> str:
        names = *leaf_names(self), *_static_names(self)
        return f"{type(self).__name__}({', '.join(f'{name}={_summary(getattr(self, name))}' for name in names)})"


def register_trees() -> None:
    """Make pytrees of the classes defined so far, if JAX is imported."""
    jax = sys.modules.get("jax")
    while _UNREGISTERED and hasattr(jax, "tree_util"):
        _register(jax.tree_util, _UNREGISTERED.pop())  # type: ignore[union-attr]


def _register(tree_util: ModuleType, cls: type) -> None:
    leaves, structure = leaf_names(cls), _static_names(cls)
    keys = [tree_util.GetAttrKey(name) for name in leaves]

    def flatten(tree: Tree) -> tuple[list[PyTree], tuple[object, ...]]:
        return [getattr(tree, name) for name in leaves], tuple(getattr(tree, name) for name in structure)

    def flatten_with_keys(tree: Tree) -> tuple[list[tuple[object, PyTree]], tuple[object, ...]]:
        children, fixed = flatten(tree)
        return list(zip(keys, children, strict=True)), fixed

    def unflatten(fixed: tuple[object, ...], children: Iterable[PyTree]) -> Tree:
        return _rebuilt(cls, zip((*leaves, *structure), (*children, *fixed), strict=True))

    tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


def leaf_names(tree: Any) -> list[str]:
    """Return the names of the fields that hold arrays or trees."""
    return [field.name for field in dataclasses.fields(tree) if not field.metadata.get("static")]


def _static_names(tree: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(tree) if field.metadata.get("static")]


def _rebuilt(cls: type[T], fields: Mapping[str, PyTree] | Iterable[tuple[str, PyTree]]) -> T:
    made = object.__new__(cls)
    made.__dict__.update(fields)
    return made


def map_leaves(function: Callable[[Any], Any], tree: T) -> T:
    """Apply a function to the leaves of trees, lists, tuples and dictionaries; the same object if it changes none."""
    if isinstance(tree, Tree):
        fields = dict(vars(tree))
        new = fields | {name: map_leaves(function, fields[name]) for name in leaf_names(tree)}
        return tree if all(new[name] is value for name, value in fields.items()) else _rebuilt(type(tree), new)
    if isinstance(tree, dict):
        changed = {key: map_leaves(function, value) for key, value in tree.items()}
        return tree if all(changed[key] is value for key, value in tree.items()) else changed  # type: ignore[return-value]
    if isinstance(tree, list | tuple):
        items = [map_leaves(function, item) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return function(tree)


def leaves_of(tree: PyTree) -> Iterator[Any]:
    """Yield the leaves in order, None included."""
    if isinstance(tree, Tree):
        tree = [getattr(tree, name) for name in leaf_names(tree)]
    elif isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from leaves_of(item)
    else:
        yield tree


def _summary(value: object) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return repr(value) if shape is None or dtype is None else f"{dtype}{list(shape)}"
