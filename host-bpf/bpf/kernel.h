/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The kernel's types, as far as the programs read them; libbpf moves the
 * offsets to those of the running kernel.
 */
#ifndef VCPUFREQ_KERNEL_H
#define VCPUFREQ_KERNEL_H

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct task_struct {
	__u32 pid;	/* both signed in the kernel, and never negative */
	__u32 tgid;
};

/* A structure that begins with 32 bits: what a guest has written is read as one. */
struct refcount_struct {
	struct {
		int counter;
	} refs;
};

#pragma clang attribute pop

/* include/trace/events/kvm.h */
#define KVM_TRACE_MMIO_READ_UNSATISFIED	0
#define KVM_TRACE_MMIO_READ		1
#define KVM_TRACE_MMIO_WRITE		2

/* include/asm-generic/rwonce.h: what another CPU may write meanwhile */
#define READ_ONCE(x)	(*(const volatile typeof(x) *)&(x))

#endif /* VCPUFREQ_KERNEL_H */
