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
 *
 * Wrong when: a vCPU is woken, or moved to another pCPU, and waits. Until it has
 * run there, the others don't count what it asks for.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#include "kernel.h"
#include "dispatch.h"
#include "util.h"

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

/*
 * A vCPU's thread leaves this pCPU and goes on waiting for it: what it asks for
 * above its utilization counts there. A thread has one switch at a time.
 */
static __always_inline void begin_to_wait(struct task_struct *p, __u32 number)
{
	const struct rq *rq = bpf_this_cpu_ptr(&runqueues);
	struct vcpufreq_dispatch_vcpus *on = dispatch_on(number);
	struct vcpufreq_dispatch_thread *thread;
	__u32 own;

	if (!on || !on->request)
		return;
	own = own_util(p, rq);
	if (on->request <= own)
		return;
	thread = bpf_task_storage_get(&threads, p, NULL, 0);
	if (!thread || thread->waits_on)
		return;
	thread->part = on->request - own;
	thread->waits_on = number + 1;
	__sync_fetch_and_add(&on->waiting, thread->part);
}

/* It runs, maybe on another pCPU, and maybe as no VM's any more. */
static __always_inline void end_wait(struct vcpufreq_dispatch_thread *thread)
{
	struct vcpufreq_dispatch_vcpus *on;

	if (!thread->waits_on)
		return;
	on = dispatch_on(thread->waits_on - 1);
	if (on)
		__sync_fetch_and_add(&on->waiting, -thread->part);
	thread->waits_on = 0;
}

SEC("tp_btf/sched_switch")
int BPF_PROG(dispatch_switch, bool preempt, struct task_struct *prev, struct task_struct *next,
	     unsigned int prev_state)
{
	__u32 number = bpf_get_smp_processor_id(), place;
	struct vcpufreq_dispatch_vcpus *on = dispatch_on(number);
	struct vcpufreq_dispatch_thread *comes = NULL;

	if (!on)
		return 0;
	/* Most threads have no storage of any map's. */
	if (next->bpf_storage)
		comes = bpf_task_storage_get(&threads, next, NULL, 0);
	place = comes ? READ_ONCE(comes->place) : 0;
	if (READ_ONCE(on->place)) {
		if (preempt || !prev_state)
			begin_to_wait(prev, number);
		__sync_lock_test_and_set(&on->place, 0);
	}
	if (comes)
		end_wait(comes);
	if (!place)
		return 0;
	/* Its VM's program stores what it asks for. */
	on->request = 0;
	__sync_lock_test_and_set(&on->place, place);
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
	place = place_on(number);
	if (place)
		bpf_tail_call(ctx, &on_frequency, place >> 16);
	return 0;
}

/* In the context of the vCPU that reads or writes. */
SEC("tp_btf/kvm_mmio")
int BPF_PROG(dispatch_write)
{
	__u32 place = place_on(bpf_get_smp_processor_id());

	if (place)
		bpf_tail_call(ctx, &on_write, place >> 16);
	return 0;
}

/*
 * Nothing calls it. A VMM finds the set by this program's name and its only map,
 * as long as another one holds it. A search by the maps' names would open each
 * map, and the kernel never frees an array of programs that two searches open and
 * close before its deferred clearing has run (prog_array_map_clear).
 */
SEC("socket")
int dispatch_set(struct __sk_buff *skb)
{
	__u32 first = 0;

	return !!bpf_map_lookup_elem(&dispatch_slots, &first);
}
