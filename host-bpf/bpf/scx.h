/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Targets of sched_ext in the place of clamps: what vCPUs ask for is added to
 * what a CPU's tasks use.
 *
 * schedutil runs a CPU at 1.25 * (utilization + target). A vCPU's own
 * utilization is in the first term, so its part of the target is what it asks
 * for without the headroom, less that.
 *
 * The maps belong to the service (`vcpufreq scx start`), which pins them; the
 * programs of its VMs use the same ones. The program that takes a vCPU's old
 * part out of `counted` subtracts it, and adds what it has put there: the sums
 * are right without a lock.
 *
 * scx_retarget() calls the kernel function, which takes the run queue's lock:
 * it may not be called with that held. src/hooks.rs has the hooks where it
 * may.
 */
#ifndef VCPUFREQ_SCX_H
#define VCPUFREQ_SCX_H

#include <linux/errno.h>

#include "util.h"

#define VCPUFREQ_SCX_LAYOUT	2	/* raised with every change below */

#define SCX_TARGET_MAX		1024	/* the kernel ends the scheduler above it */
#define SCX_TARGET_UNKNOWN	0xffffffff
#define SCX_OTHERS_MIN		38	/* less of others is none, as by --sum */

enum vcpufreq_scx_state {
	VCPUFREQ_SCX_OFF,	/* no scheduler of ours: targets mean nothing */
	VCPUFREQ_SCX_STARTING,
	VCPUFREQ_SCX_ON,
};

/* A vCPU's thread. */
struct vcpufreq_scx_vcpu {
	__u64 counted;		/* CPU that counts it, plus 1, << 32 | its part there */
	__u32 request;		/* of 1024, at the largest CPU */
	__u32 known;		/* 1: it is one of `vcpus` */
};

/* A pCPU. A cache line each. */
struct vcpufreq_scx_cpu {
	__u32 sum;		/* of its runnable vCPUs' parts */
	__u32 set;		/* the kernel has been given this one */
	__u32 stale;		/* 1: `sum` was changed with the run queue locked */
	__u32 left;		/* the CPU that a vCPU has come from, plus 1 */
	__u32 pad[12];
};

struct vcpufreq_scx_control {
	__u32 layout;		/* VCPUFREQ_SCX_LAYOUT */
	__u32 state;		/* enum vcpufreq_scx_state */
	__u32 vcpus;		/* threads of vCPUs */
	__u32 exit_kind;	/* why the kernel has ended the scheduler */
	__u32 maps[2];		/* the kernel's numbers of scx_vcpus and scx_cpus */
	char exit_text[104];
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct vcpufreq_scx_vcpu);
} scx_vcpus SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);		/* possible CPUs */
	__type(key, __u32);
	__type(value, struct vcpufreq_scx_cpu);
} scx_cpus SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct vcpufreq_scx_control);
} scx_control SEC(".maps");

/* The verifier adds a third argument. */
void scx_bpf_cpuperf_set(__s32 cpu, __u32 perf) __ksym __weak;

static __always_inline struct vcpufreq_scx_control *scx_state(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&scx_control, &zero);
}

static __always_inline bool scx_is_on(void)
{
	struct vcpufreq_scx_control *control = scx_state();

	return control && READ_ONCE(control->state) == VCPUFREQ_SCX_ON;
}

static __always_inline struct vcpufreq_scx_vcpu *scx_vcpu_of(struct task_struct *p)
{
	return bpf_task_storage_get(&scx_vcpus, p, NULL, 0);
}

/*
 * Never with a run queue locked. Of two at the same time the later sum stays.
 * Without our scheduler it would act on somebody else's.
 */
static __always_inline void scx_retarget(__u32 number)
{
	struct vcpufreq_scx_cpu *cpu = bpf_map_lookup_elem(&scx_cpus, &number);
	struct vcpufreq_scx_control *control = scx_state();
	__u32 sum, target;

	if (!cpu || !control || READ_ONCE(control->state) == VCPUFREQ_SCX_OFF ||
	    !bpf_ksym_exists(scx_bpf_cpuperf_set))
		return;
	for (int i = 0; i < 4; i++) {
		sum = READ_ONCE(cpu->sum);
		/* A part may be taken out by another CPU before it is added here. */
		target = (__s32)sum < 0 ? 0 : sum;
		if (target > SCX_TARGET_MAX)
			target = SCX_TARGET_MAX;
		if (__sync_lock_test_and_set(&cpu->set, target) == target && !i)
			return;
		scx_bpf_cpuperf_set(number, target);
		if (sum == READ_ONCE(cpu->sum))
			return;
	}
	/* Which of them the kernel has isn't known: the next one sets it. */
	__sync_lock_test_and_set(&cpu->set, SCX_TARGET_UNKNOWN);
	__sync_lock_test_and_set(&cpu->stale, 1);
}

/*
 * What the thread uses already, in what schedutil adds the target to: the
 * larger of its utilization and its estimate, as the kernel takes it for a CPU.
 * A little of others is taken for its own: it would cost a frequency more.
 */
static __always_inline __u32 scx_own_util(struct task_struct *p, __u32 number)
{
	const struct rq *rq = bpf_per_cpu_ptr(&runqueues, number);
	__u32 own, estimate, all;

	if (!rq)
		return 0;
	own = own_util(p, rq);
	if (is_rt_or_deadline(p))
		return own;
	all = rq->cfs.avg.util_avg;
	estimate = rq->cfs.avg.util_est;
	if (estimate > all)
		all = estimate;
	all += rq->avg_rt.util_avg + rq->avg_dl.util_avg;
	return all > own && all - own < SCX_OTHERS_MIN ? all : own;
}

/* 1.25 is what schedutil adds. */
static __always_inline __u32 scx_part(struct task_struct *p, __u32 request, __u32 number)
{
	__u32 wanted = request * 4 / 5, own;

	if (!wanted)
		return 0;
	own = scx_own_util(p, number);
	return wanted > own ? wanted - own : 0;
}

static __always_inline void scx_add(__u32 number, __u32 part)
{
	struct vcpufreq_scx_cpu *cpu = bpf_map_lookup_elem(&scx_cpus, &number);

	if (cpu && part)
		__sync_fetch_and_add(&cpu->sum, part);
}

/*
 * Has `place`, a CPU plus 1, count the thread; 0: none does. Returns where it
 * was counted before, as CPU plus 1.
 */
static __always_inline __u32 scx_count(struct vcpufreq_scx_vcpu *vcpu, struct task_struct *p,
				       __u32 place)
{
	__u32 request, part, before = 0;
	__u64 old;

	for (int i = 0; i < 4; i++) {
		request = READ_ONCE(vcpu->request);
		part = place ? scx_part(p, request, place - 1) : 0;
		old = __sync_lock_test_and_set(&vcpu->counted, (__u64)place << 32 | part);
		if (old >> 32)
			scx_add((old >> 32) - 1, -(__u32)old);
		if (place)
			scx_add(place - 1, part);
		before = before ?: old >> 32;
		/* Else it was read before a newer one was stored. */
		if (request == READ_ONCE(vcpu->request))
			break;
	}
	return before;
}

/* Works its part out again, on the CPU that counts it. */
static __always_inline void scx_update(struct vcpufreq_scx_vcpu *vcpu, struct task_struct *p)
{
	__u64 old, new;
	__u32 number;

	for (int i = 0; i < 8; i++) {
		old = READ_ONCE(vcpu->counted);
		if (!(old >> 32))
			return;
		number = (old >> 32) - 1;
		new = (old >> 32) << 32 | scx_part(p, READ_ONCE(vcpu->request), number);
		if (new == old)
			return;
		if (__sync_val_compare_and_swap(&vcpu->counted, old, new) != old)
			continue;
		scx_add(number, (__u32)new - (__u32)old);
		scx_retarget(number);
		return;
	}
}

/* A vCPU asks for `request`, of 1024; false if its thread is none of the service's. */
static __always_inline bool scx_request(struct task_struct *p, __u32 request)
{
	struct vcpufreq_scx_vcpu *vcpu = scx_vcpu_of(p);

	if (!vcpu)
		return false;
	__sync_lock_test_and_set(&vcpu->request, request);
	scx_update(vcpu, p);
	return true;
}

/* Makes the current thread one of the service's, which counts it where it runs. */
static __always_inline int scx_register(struct task_struct *p)
{
	struct vcpufreq_scx_control *control = scx_state();
	struct vcpufreq_scx_vcpu *vcpu;

	vcpu = bpf_task_storage_get(&scx_vcpus, p, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!vcpu || !control)
		return -ENOMEM;
	if (!__sync_lock_test_and_set(&vcpu->known, 1))
		__sync_fetch_and_add(&control->vcpus, 1);
	return 0;
}

/* A thread is none of the service's any more: it has ended, or its VM does without. */
static __always_inline void scx_leave(struct task_struct *p)
{
	struct vcpufreq_scx_control *control = scx_state();
	struct vcpufreq_scx_vcpu *vcpu = scx_vcpu_of(p);

	if (vcpu && control && __sync_lock_test_and_set(&vcpu->known, 0))
		__sync_fetch_and_add(&control->vcpus, -1);
}

#endif /* VCPUFREQ_SCX_H */
