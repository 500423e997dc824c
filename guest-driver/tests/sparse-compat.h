/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Read by sparse before each file, never by the compiler. Sparse 0.6.4 is the
 * newest release, and headers of Linux 7 use two things that it doesn't know:
 * a C23 operator, and string lengths in constant expressions (MODULE_INFO).
 */
#ifdef __CHECKER__
#define __typeof_unqual__ __typeof__
#define __builtin_strlen(string) (sizeof(string) - 1)
#endif
