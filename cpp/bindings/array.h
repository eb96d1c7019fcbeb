// Conversion of array arguments to spans.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "core/bytes.h"

namespace slimtensors::bindings {

namespace nb = nanobind;

// A 1-D contiguous uint8 array in CPU memory: a torch tensor, a numpy array or any other buffer. Never a
// copy.
template <class Byte>
struct Array {
    using Owner = nb::ndarray<Byte, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    std::span<Byte> bytes;
    Owner owner;        // empty if `source` keeps the memory alive
    nb::object source;  // the Python object
};

// torch's __dlpack__ takes 2.4 us per argument, more than the work on a small tensor. Newer versions of
// DLPack have a table of C functions, which takes 0.1 us. Its layout is fixed within major version 1.
struct DlpackExchange {
    std::uint32_t major, minor;
    DlpackExchange* older;
    void* allocate;
    void* export_owned;
    void* import_owned;
    int (*borrow)(void* object, nb::dlpack::dltensor* out);
};

// Return the table of exactly this type, or null. Buffers do not need it: nanobind reads them as quickly.
// Subclasses inherit the attribute but may have no memory of their own (fake tensors), so they are excluded.
inline const DlpackExchange* dlpack_exchange(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    static PyTypeObject* known_type = nullptr;  // guarded by the GIL
    static const DlpackExchange* known = nullptr;
    if (type == known_type) return known;
    if (PyObject_CheckBuffer(object)) return nullptr;
    constexpr const char* attribute = "__dlpack_c_exchange_api__";
    const nb::object own = nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dict__"));
    const nb::object capsule =
        nb::steal(own.is_valid() ? PyMapping_GetItemString(own.ptr(), attribute) : nullptr);
    const void* found =
        capsule.is_valid() ? PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api") : nullptr;
    PyErr_Clear();  // the attribute is optional
    const auto* table = static_cast<const DlpackExchange*>(found);
    if (!table || table->major != 1 || !table->borrow) return nullptr;
    Py_INCREF(reinterpret_cast<PyObject*>(type));  // keeps the address unique
    known_type = type;
    return known = table;
}

inline bool is_byte_vector(const nb::dlpack::dltensor& t) {
    return t.device.device_type == nb::device::cpu::value && t.dtype == nb::dtype<std::uint8_t>() &&
           t.ndim == 1 && (!t.strides || t.strides[0] == 1 || t.shape[0] <= 1);
}

}  // namespace slimtensors::bindings

template <class Byte>
struct nanobind::detail::type_caster<slimtensors::bindings::Array<Byte>> {
    using Array = slimtensors::bindings::Array<Byte>;
    NB_TYPE_CASTER(Array, make_caster<typename Array::Owner>::Name)

    bool from_python(handle source, std::uint32_t flags, cleanup_list* cleanup) noexcept {
        if (const auto* exchange = slimtensors::bindings::dlpack_exchange(source.ptr())) {
            dlpack::dltensor tensor;
            if (exchange->borrow(source.ptr(), &tensor) != 0) {
                PyErr_Clear();
                return false;
            }
            if (!slimtensors::bindings::is_byte_vector(tensor)) return false;
            value.bytes = {static_cast<Byte*>(tensor.data) + tensor.byte_offset,
                           static_cast<std::size_t>(tensor.shape[0])};
            value.source = borrow(source);
            return true;
        }
        make_caster<typename Array::Owner> owner;
        // no implicit conversion: output written to a converted copy would be lost
        if (!owner.from_python(source, flags & ~std::uint32_t{cast_flags::convert}, cleanup)) return false;
        value.owner = owner.value;
        value.bytes = {value.owner.data(), value.owner.size()};
        value.source = borrow(source);
        return true;
    }
};
