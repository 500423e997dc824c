/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What all VMs of a host share: the programs on the kernel's hooks, which find
 * the VM that an event is of and call its program (see dispatch.bpf.c).
 *
 * A VM has a slot. Its threads' storage and the entry of the pCPU that one of
 * them runs on have a place: the slot << 16 | the vCPU plus 1. A guest sees
 * nothing of this. A VMM that is not confined can write it, and could end the
 * path of others.
 *
 * src/layout.rs has the same in Rust.
 */
#ifndef VCPUFREQ_DISPATCH_H
#define VCPUFREQ_DISPATCH_H

#define VCPUFREQ_DISPATCH_LAYOUT 3	/* raised with every change below */
#define VCPUFREQ_SLOTS_MAX	1024	/* VMs of a host */

#define VCPUFREQ_PLACE(slot, vcpu)	((slot) << 16 | ((vcpu) + 1))

/* A pCPU. A cache line each. */
struct vcpufreq_dispatch_cpu {
	__u32 khz;		/* now; 0: not known yet */
	__u32 pad[15];
};

/*
 * A pCPU's vCPUs. A cache line each. No VMM maps it: a confined one that its guest
 * has taken over can't write it, and so makes no request of another VM's vCPU.
 */
struct vcpufreq_dispatch_vcpus {
	__u32 place;		/* of the one that runs on it; 0: none */
	__u32 request;		/* of that one, as a utilization */
	__u32 waiting;		/* what those that wait to run ask for above their utilization */
	__u32 pad[13];
};

/* A vCPU's thread. */
struct vcpufreq_dispatch_thread {
	__u32 place;
	__u32 waits_on;		/* the pCPU that counts `part`, plus 1; 0: none does */
	__u32 part;
};

/* Where a VMM finds the rest, and which slots are taken. */
struct vcpufreq_dispatch_slots {
	__u32 layout;		/* VCPUFREQ_DISPATCH_LAYOUT; 0: not attached yet */
	__u32 maps[6];		/* the kernel's numbers, as those below */
	__u32 links[3];
	__u32 programs[3];
	__u32 pad;
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

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);		/* possible CPUs */
	__type(key, __u32);
	__type(value, struct vcpufreq_dispatch_vcpus);
} dispatch_vcpus SEC(".maps");

/* Threads that are vCPUs. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct vcpufreq_dispatch_thread);
} threads SEC(".maps");

static __always_inline struct vcpufreq_dispatch_cpu *dispatch_cpu(__u32 number)
{
	return bpf_map_lookup_elem(&dispatch_cpus, &number);
}

static __always_inline struct vcpufreq_dispatch_vcpus *dispatch_on(__u32 number)
{
	return bpf_map_lookup_elem(&dispatch_vcpus, &number);
}

/* Of the vCPU that runs on a pCPU; 0: none does. */
static __always_inline __u32 place_on(__u32 number)
{
	struct vcpufreq_dispatch_vcpus *on = dispatch_on(number);

	return on ? READ_ONCE(on->place) : 0;
}

static __always_inline __u32 waiting_on(__u32 number)
{
	struct vcpufreq_dispatch_vcpus *on = dispatch_on(number);
	__s32 waiting = on ? READ_ONCE(on->waiting) : 0;

	return waiting > 0 ? waiting : 0;
}

#endif /* VCPUFREQ_DISPATCH_H */
