/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Read by sparse before each file, never by the compiler. Sparse 0.6.4 doesn't
 * know three operators of clang's; and libbpf's macro around a program passes it
 * numbers as pointers, with the compiler's warning about that off.
 */
#ifdef __CHECKER__
#define __builtin_has_attribute(...) 1
#define __builtin_btf_type_id(...) 0
#define __builtin_preserve_field_info(...) 0
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#undef BPF_PROG
#define BPF_PROG(name, args...) name(unsigned long long *ctx, ##args)
#endif
