// SPDX-License-Identifier: GPL-2.0-only
/*
 * The programs on the kernel's hooks, of which a host has one set: each finds
 * the VM that an event is of, and calls that VM's program for it.
 *
 * Nothing of it is pinned. Each VMM holds its links and maps open, and the
 * kernel frees them with the last of these.
 *
 * Cost: a switch between threads that are no vCPUs takes a look at two fields,
 * however many VMs there are, and a look-up where another map has something of
 * the thread; see docs/bpf.md.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#include "kernel.h"
#include "dispatch.h"

char LICENSE[] SEC("license") = "GPL";

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct vcpufreq_dispatch_slots);
} dispatch_slots SEC(".maps");

/* A VM's programs, by its slot. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, VCPUFREQ_SLOTS_MAX);
	__type(key, __u32);
	__type(value, __u32);
} on_switch SEC(".maps"), on_frequency SEC(".maps"), on_write SEC(".maps");

SEC("tp_btf/sched_switch")
int BPF_PROG(dispatch_switch, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	struct vcpufreq_dispatch_cpu *cpu = dispatch_cpu(bpf_get_smp_processor_id());
	__u32 *comes = NULL, place;

	if (!cpu)
		return 0;
	/* Most threads have no storage of any map's. */
	if (next->bpf_storage)
		comes = bpf_task_storage_get(&threads, next, NULL, 0);
	place = comes ? READ_ONCE(*comes) : 0;
	if (READ_ONCE(cpu->place))
		__sync_lock_test_and_set(&cpu->place, 0);
	if (!place)
		return 0;
	__sync_lock_test_and_set(&cpu->place, place);
	bpf_tail_call(ctx, &on_switch, place >> 16);
	return 0;
}

/* The kernel tells each CPU of a policy, also on a fast switch. */
SEC("tp_btf/cpu_frequency")
int BPF_PROG(dispatch_frequency, unsigned int khz, unsigned int number)
{
	struct vcpufreq_dispatch_cpu *cpu = dispatch_cpu(number);
	__u32 place;

	if (!cpu)
		return 0;
	__sync_lock_test_and_set(&cpu->khz, khz);
	place = READ_ONCE(cpu->place);
	if (place)
		bpf_tail_call(ctx, &on_frequency, place >> 16);
	return 0;
}

/* In the context of the vCPU that reads or writes. */
SEC("tp_btf/kvm_mmio")
int BPF_PROG(dispatch_write)
{
	struct vcpufreq_dispatch_cpu *cpu = dispatch_cpu(bpf_get_smp_processor_id());
	__u32 place = cpu ? READ_ONCE(cpu->place) : 0;

	if (place)
		bpf_tail_call(ctx, &on_write, place >> 16);
	return 0;
}
