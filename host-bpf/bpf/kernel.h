/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The kernel's types, as far as the programs read them; libbpf moves the
 * offsets to those of the running kernel.
 */
#ifndef VCPUFREQ_KERNEL_H
#define VCPUFREQ_KERNEL_H

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sched_avg {
	unsigned long util_avg;
	unsigned int util_est;
};

struct sched_entity {
	struct sched_avg avg;
};

struct thread_info {
	__u32 cpu;
};

struct bpf_local_storage;

struct task_struct {
	struct bpf_local_storage *bpf_storage;	/* 0: no map has anything of it */
	struct thread_info thread_info;
	__u32 pid;	/* signed in the kernel, and never negative */
	int prio;
	__u32 policy;
	int nr_cpus_allowed;
	unsigned long nvcsw;	/* how often it has gone to sleep */
	struct sched_entity se;
};

struct cfs_rq {
	struct sched_avg avg;
};

struct rq {
	struct cfs_rq cfs;
	struct sched_avg avg_rt;
	struct sched_avg avg_dl;
};

struct hrtimer;

enum scx_exit_kind { SCX_EXIT_NONE };

struct scx_exit_info {
	enum scx_exit_kind kind;
	const char *reason;
	const char *msg;
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
