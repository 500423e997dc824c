/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What else a vCPU's pCPU has to do, which is added to what the vCPU asks for.
 * uclamp takes the maximum over a run queue's threads, and not the sum.
 *
 * What other vCPUs there ask for is added too, as far as it is above their
 * utilization, which is in that of the pCPU: only while they wait to run.
 */
#ifndef VCPUFREQ_SUM_H
#define VCPUFREQ_SUM_H

#include "util.h"

/* include/linux/sched/prio.h: below are SCHED_FIFO and RR; below 0, DEADLINE. */
#define MAX_RT_PRIO		100

static __always_inline __u32 less(__u64 all, __u64 own)
{
	return all > own ? all - own : 0;
}

/*
 * The utilization of this CPU by others than the thread `own`, which is on it,
 * as schedutil reads it, and what waiting vCPUs ask for above theirs, with the
 * quarter that schedutil adds; 0..1024. The time of a real-time thread can't be
 * separated from that of others, which are left out then.
 */
static __always_inline __u32 others_here(const struct task_struct *own,
					 const struct vcpufreq_bpf_policy *policy)
{
	const struct rq *rq = bpf_this_cpu_ptr(&runqueues);
	bool fair = own->prio >= MAX_RT_PRIO;
	__u64 mine = fair ? own->se.avg.util_avg : 0;
	__u64 util = less(rq->cfs.avg.util_avg, mine), estimate;

	/* A structure before Linux 6.8. */
	if (bpf_core_field_exists(rq->cfs.avg.util_est)) {
		mine = fair ? own->se.avg.util_est & ~UTIL_AVG_UNCHANGED : 0;
		estimate = less(rq->cfs.avg.util_est, mine);
		if (estimate > util)
			util = estimate;
	}
	if (fair || own->prio < 0)
		util += rq->avg_rt.util_avg;
	if (own->prio >= 0)
		util += rq->avg_dl.util_avg;
	util += waiting_on(bpf_get_smp_processor_id());
	util = util * 5 * policy->headroom_num / (4 * (__u64)policy->headroom_den ?: 1);
	return util < 1024 ? util : 1024;
}

/* Tells the other vCPUs of this pCPU, of whatever VM, what the one that is on it asks for. */
static __always_inline void share_request(const struct vcpufreq_bpf_policy *policy,
					  const struct vcpufreq_bpf_domain *domain)
{
	struct vcpufreq_dispatch_vcpus *on = dispatch_on(bpf_get_smp_processor_id());
	__u32 clamp = READ_ONCE(domain->clamp), request = 0;

	if (READ_ONCE(domain->granted_khz) && clamp != VCPUFREQ_BPF_NO_CLAMP)
		request = (clamp & 0xffff) * 4 * policy->headroom_den /
			  (5 * policy->headroom_num ?: 1);
	if (on)
		on->request = request;
}

/* So much may the neighbours' utilization change before the clamp follows; less is none. */
#define OTHERS_STEP	48
/* So long does the worker have peace at least. */
#define REFRESH_NS	4000000

/* What is shown of this pCPU, and added; returns the latter. */
static __always_inline __u32 look_at_load(struct vcpufreq_bpf_vcpu *vcpu,
					  const struct vcpufreq_bpf_policy *policy,
					  const struct task_struct *own)
{
	__u32 others = others_here(own, policy);

	vcpu->own_util = own->se.avg.util_avg;
	vcpu->others_util = others;
	return others;
}

/*
 * Looks what else this pCPU has to do, where vCPU `id` runs as thread `own`.
 * Whether what is added to the domain's clamp has changed: that is the most of
 * the pCPUs on which its vCPUs run. `before` gets what it was.
 */
static __always_inline bool others_changed(struct vcpufreq_bpf_vcpu *vcpu, __u32 id,
					   const struct vcpufreq_bpf_policy *policy,
					   struct vcpufreq_bpf_domain *domain,
					   const struct task_struct *own, __u64 *before)
{
	__u64 was = READ_ONCE(domain->others);
	__u32 others = look_at_load(vcpu, policy, own), util = was, of = was >> 32, key;

	*before = was;
	if (others < OTHERS_STEP)
		others = 0;
	if (others == util || (others && others + OTHERS_STEP > util &&
			       others < util + OTHERS_STEP))
		return false;
	if (others < util && of && of != id + 1) {
		key = of - 1;
		vcpu = bpf_map_lookup_elem(&vcpus, &key);
		key = vcpu ? READ_ONCE(vcpu->cpu) - 1 : 0;
		if (vcpu_on(key) == of)
			return false;
	}
	__sync_lock_test_and_set(&domain->others, (__u64)(id + 1) << 32 | others);
	return true;
}

/* Has the worker write a domain's clamp anew; false: there is no room to tell it. */
static __always_inline bool tell_refresh(const struct vcpufreq_bpf_policy *policy,
					 struct vcpufreq_bpf_domain *domain, __u32 id, __u64 now)
{
	struct vcpufreq_bpf_event event = { .vcpu = id, .kind = VCPUFREQ_BPF_REFRESH };

	if (__sync_lock_test_and_set(&domain->refresh, 1))
		return true;
	domain->refreshed_ns = now;
	event.domain = policy->domain;
	event.ns = now;
	if (!bpf_ringbuf_output(&events, &event, sizeof(event), 0))
		return true;
	__sync_lock_test_and_set(&domain->refresh, 0);
	return false;
}

/*
 * At a switch to a vCPU: shares what it asks for. Where requests add up, and the
 * load beside it has changed, the worker then writes the clamp anew.
 */
static __always_inline void refresh_sum(struct vcpufreq_bpf_vcpu *vcpu, __u32 id,
					const struct task_struct *own)
{
	const struct vcpufreq_bpf_policy *policy = policy_of(id);
	struct vcpufreq_bpf_domain *domain;
	__u64 now, since, before;

	if (!policy)
		return;
	domain = bpf_map_lookup_elem(&domains, (void *)&policy->domain);
	if (!domain)
		return;
	share_request(policy, domain);
	if (policy->actuator == VCPUFREQ_BPF_SCX)
		look_at_load(vcpu, policy, own);
	if (!policy->sum || !READ_ONCE(domain->granted_khz))
		return;
	now = bpf_ktime_get_ns();
	since = now - READ_ONCE(domain->refreshed_ns);
	/* A guest that sleeps and wakes makes no more work than one that asks. */
	if (since < REFRESH_NS || since < policy->interval_ns ||
	    !others_changed(vcpu, id, policy, domain, own, &before))
		return;
	/* Without room the next look finds the change again. */
	if (!tell_refresh(policy, domain, id, now))
		__sync_lock_test_and_set(&domain->others, before);
}

/*
 * The clamp where a domain asks for `clamp`, with its neighbours' utilization. Nothing is
 * added to a ceiling: on the host a limited task's neighbours, while they run, lift its
 * limit by themselves.
 */
static __always_inline __u32 with_others(const struct vcpufreq_bpf_policy *policy,
					 const struct vcpufreq_bpf_domain *domain, __u32 clamp)
{
	if (!policy->sum || clamp >> 16 != 1024 || !READ_ONCE(domain->granted_khz))
		return clamp;
	return VCPUFREQ_BPF_CLAMP(summed(policy, clamp & 0xffff, (__u32)READ_ONCE(domain->others)),
				  1024);
}

/* The clamp in force where a domain asks for `clamp`. */
static __always_inline __u32 clamp_in_force(const struct vcpufreq_bpf_policy *policy,
					    const struct vcpufreq_bpf_domain *domain, __u32 clamp)
{
	return bounded(policy, READ_ONCE(domain->bounds), with_others(policy, domain, clamp));
}

#endif /* VCPUFREQ_SUM_H */
