// Which instruction sets the cpu machine was compiled for, and which of them this processor runs.
#pragma once

namespace kittens {

enum class cpu_flavour : int { generic, avx2, avx512, amx };
inline constexpr int cpu_flavours = 4;

const char* name(cpu_flavour);
bool is_compiled(cpu_flavour);
bool runs_here(cpu_flavour);  // compiled, and this processor and its system have what it needs
cpu_flavour fastest_cpu_flavour();

}  // namespace kittens
