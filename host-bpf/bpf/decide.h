/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The rule from a request to a clamp where an operator's policy takes the built-in one's
 * place: `arith.h` decides first, then the policy is asked, then the VM's limits bound it.
 *
 * The policy is a program on the entry of vcpufreq_policy(). It answers in a map: the
 * verifier lets it see no pointer of this program's.
 */
#ifndef VCPUFREQ_DECIDE_H
#define VCPUFREQ_DECIDE_H

#include "vcpufreq_policy.h"

/* Two for each vCPU, one for a request that it writes, one for a switch to it; one for the VMM. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);		/* 2 * vCPUs + 1 */
	__type(key, __u32);
	__type(value, struct vcpufreq_policy_call);
} policy_calls SEC(".maps");

/* What came of a question. */
enum policy_outcome {
	POLICY_ANSWERED,
	POLICY_BOUNDED,		/* it would be outside of the VM's limits */
	POLICY_SILENT,		/* it is gone, or the kernel has preempted it on this CPU */
};

/* Where a policy is attached. Global: else the compiler would know that it does nothing. */
__noinline int vcpufreq_policy(__u32 slot)
{
	asm volatile("" : "+r"(slot) : : "memory");
	return slot;
}

/* What a policy has answered, within what the VM may have. */
static __always_inline __u32 within_limits(const struct vcpufreq_bpf_policy *p, __u32 min,
					   __u32 max)
{
	if (max > 1024)
		max = 1024;
	if (min > p->limit)
		min = p->limit;
	if (min > max)
		min = max;
	if (min < p->floor)
		min = p->floor;
	if (max < min)
		max = min;
	return VCPUFREQ_BPF_CLAMP(min, max);
}

/*
 * Asks the policy `ask->number` about a request for which the built-in rule makes
 * `clamp`; that becomes what is to be in force. `defer`: whether the VMM is to set it.
 */
static __always_inline enum policy_outcome
ask_policy(const struct vcpufreq_bpf_policy *p, __u32 slot, struct vcpufreq_policy_ask *ask,
	   __u32 *clamp, bool *defer)
{
	struct vcpufreq_policy_call *call = bpf_map_lookup_elem(&policy_calls, &slot);
	__u32 min, max;

	if (!call)
		return POLICY_SILENT;
	ask->min = *clamp & 0xffff;
	ask->max = *clamp >> 16;
	ask->limit = p->limit > p->floor ? p->limit : p->floor;
	ask->floor = p->floor;
	call->ask = *ask;
	call->answer.min = ask->min;
	call->answer.max = ask->max;
	call->answer.defer = 0;
	call->answer.answered = 0;
	vcpufreq_policy(slot);
	if (READ_ONCE(call->answer.answered) != ask->number)
		return POLICY_SILENT;
	min = READ_ONCE(call->answer.min);
	max = READ_ONCE(call->answer.max);
	*defer = READ_ONCE(call->answer.defer);
	*clamp = within_limits(p, min, max);
	return min == (*clamp & 0xffff) && max == *clamp >> 16 ? POLICY_ANSWERED : POLICY_BOUNDED;
}

#endif /* VCPUFREQ_DECIDE_H */
