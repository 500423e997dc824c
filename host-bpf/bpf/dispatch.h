/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What all VMs of a host share: the programs on the kernel's hooks, which find
 * the VM that an event is of and call its program (see dispatch.bpf.c).
 *
 * A VM has a slot. Its threads' storage and the entry of the pCPU that one of
 * them runs on have a place: the slot << 16 | the vCPU plus 1. A guest sees
 * nothing of this. Each VMM can write it, and could end the path of others.
 *
 * src/dispatch.rs has the same in Rust.
 */
#ifndef VCPUFREQ_DISPATCH_H
#define VCPUFREQ_DISPATCH_H

#define VCPUFREQ_DISPATCH_LAYOUT 1	/* raised with every change below */
#define VCPUFREQ_SLOTS_MAX	1024	/* VMs of a host */

#define VCPUFREQ_PLACE(slot, vcpu)	((slot) << 16 | ((vcpu) + 1))

/* A pCPU. A cache line each. */
struct vcpufreq_dispatch_cpu {
	__u32 khz;		/* now; 0: not known yet */
	__u32 place;		/* of the vCPU that runs on it; 0: none */
	__u32 pad[14];
};

/* Where a VMM finds the rest, and which slots are taken. */
struct vcpufreq_dispatch_slots {
	__u32 layout;		/* VCPUFREQ_DISPATCH_LAYOUT; 0: not attached yet */
	__u32 maps[5];		/* the kernel's numbers, as those below */
	__u32 links[3];
	__u32 programs[3];
	/* A map that the slot's VMM alone has: while the kernel lists it, that lives. */
	__u32 owners[VCPUFREQ_SLOTS_MAX];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);		/* possible CPUs */
	__type(key, __u32);
	__type(value, struct vcpufreq_dispatch_cpu);
} dispatch_cpus SEC(".maps");

/* Threads that are vCPUs: the place of each. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u32);
} threads SEC(".maps");

static __always_inline struct vcpufreq_dispatch_cpu *dispatch_cpu(__u32 number)
{
	return bpf_map_lookup_elem(&dispatch_cpus, &number);
}

#endif /* VCPUFREQ_DISPATCH_H */
