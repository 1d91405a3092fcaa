// Exports the kernels of a compiled library: CUSIM_KERNEL(name, "a,b", bound) defines `cusim_kernel_name`.

#pragma once

#include <utility>

#include "language.h"

extern "C" {
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char _end[] __attribute__((visibility("hidden")));
// Bounds of the sections with the __shared__ variables and their descriptions; null if there are none.
extern char __start_cusim_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_cusim_shared[] __attribute__((weak, visibility("hidden")));
extern const cusim::SharedVariable __start_cusim_variables[] __attribute__((weak, visibility("hidden")));
extern const cusim::SharedVariable __stop_cusim_variables[] __attribute__((weak, visibility("hidden")));
}

namespace cusim {

template <class T> constexpr Kind kind_of() {
    if (std::is_pointer_v<T>) return Kind::kPointer;
    if (std::is_floating_point_v<T>) return Kind::kFloat;
    return std::is_integral_v<T> ? Kind::kInteger : Kind::kOther;
}

template <class T> constexpr int bytes_of() {
    if constexpr (std::is_void_v<T>) return 0;
    else return int(sizeof(T));
}

template <class T> constexpr Parameter describe() {
    using Pointed = std::remove_pointer_t<T>;
    return {kind_of<T>(), int(sizeof(T)), std::is_const_v<Pointed>, kind_of<std::remove_cv_t<Pointed>>(),
            bytes_of<Pointed>()};
}

template <auto kernel> struct Described;

template <class... A, void (*kernel)(A...)> struct Described<kernel> {
    static constexpr Parameter parameters[] = {describe<A>()..., Parameter{}};
    static constexpr int num_parameters = sizeof...(A);

    template <size_t... I>
    __attribute__((no_sanitize("thread"))) static void call(void** arguments, std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
    }
    __attribute__((no_sanitize("thread"))) static void run(void** arguments) {
        call(arguments, std::index_sequence_for<A...>{});
    }
};

}  // namespace cusim

// The arguments after PARAMETER_NAMES are those of __launch_bounds__, or 0.
#define CUSIM_KERNEL(NAME, PARAMETER_NAMES, ...)                                                        \
    extern "C" const cusim::Kernel cusim_kernel_##NAME = {                                              \
        cusim::Described<&NAME>::run,  cusim::Described<&NAME>::parameters,                             \
        cusim::Described<&NAME>::num_parameters, PARAMETER_NAMES, cusim::first(__VA_ARGS__),            \
        {__ehdr_start, _end, __start_cusim_shared, __stop_cusim_shared, __start_cusim_variables,        \
         __stop_cusim_variables}};

namespace cusim {
template <class... Rest> constexpr int first(int value, Rest...) { return value; }
}  // namespace cusim
