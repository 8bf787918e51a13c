"""Makes Triton's interpreter faster without changing a result. The interpreter repeats much work that needs doing only
once."""

import dataclasses


def patch_language_once_per_launch():
    """Patches the language modules once per launch. The interpreter searches and patches them again at each call of a
    nested function."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang, launch, scope = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._LangPatchScope
    patched, names = set(), {}

    def once(fn):
        variables = fn.__globals__
        if id(variables) not in names:  # `names` keeps variables alive, so that no other object gets the id
            languages = frozenset(name for name, x in variables.items() if x is tl or x is tl.core)
            names[id(variables)] = languages, variables
        languages = names[id(variables)][0]
        if languages in patched:
            return scope()
        patched.add(languages)
        return patch_lang(fn)

    def call(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, call


def leave_out_unread_checks():
    """Leaves out overflow checks that are never read. The interpreter repeats integer arithmetic in 64 bits to find
    overflows, but looks at the outcome only in debug mode."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def make_types_once():
    """Makes the interpreter reuse types. On its own the interpreter creates and checks a type and shape per result,
    even for equal types."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    make_type, make_tensor, to_numpy = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    broadcast = TritonSemantic.broadcast_impl_value
    types, shapes, numpy_types = {}, {}, {}

    def block_type(self, element_ty, shape):
        key = element_ty.name, *(core._unwrap_if_constexpr(size) for size in shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def tensor(self, handle, type):
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def numpy_type(type):
        if type.name not in numpy_types:
            numpy_types[type.name] = to_numpy(type)
        return numpy_types[type.name]

    def broadcast_value(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block_type, tensor, numpy_type
    TritonSemantic.broadcast_impl_value = broadcast_value


def ask_types_once():
    """Speeds up type comparisons, and computes the result type of two operand types only once. The interpreter compares
    types by name every time."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    equal, unwrap, promote = core.dtype.__eq__, core._unwrap_if_constexpr, TritonSemantic.computation_type_impl
    plain, promoted = {int, float, bool, core.tensor, core.dtype, core.block_type, core.pointer_type}, {}

    def dtype_equal(self, other):
        return self is other or equal(self, other)

    def unwrapped(x):
        return x if type(x) in plain else unwrap(x)

    def computation_type(self, a, a_is_scalar, b, b_is_scalar, div_or_mod):
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in promoted:
            promoted[key] = promote(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return promoted[key]

    core.dtype.__eq__, core._unwrap_if_constexpr = dtype_equal, unwrapped
    TritonSemantic.computation_type_impl = computation_type


def make_faster():
    for change in (patch_language_once_per_launch, leave_out_unread_checks, make_types_once, ask_types_once):
        try:
            change()
        except (ImportError, AttributeError, TypeError):  # no triton, or an unknown version: tests are only slower
            continue
