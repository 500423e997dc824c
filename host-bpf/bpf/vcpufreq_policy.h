/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * A policy of one's own: from a guest's request to a clamp.
 *
 * VCPUFREQ_POLICY(NAME) { ... } is a program of one function, which reads `ask` and
 * changes `answer`; that begins as the built-in rule's. The VM's limits bound what it
 * leaves there. `vcpufreq policy load` puts it into force; see docs/vcpufreq.md. It may
 * use the helpers that host-bpf/src/operator/instructions.rs lists, and loops with an
 * end that the verifier sees.
 *
 * src/layout.rs has the structures in Rust.
 */
#ifndef VCPUFREQ_POLICY_H
#define VCPUFREQ_POLICY_H

#include <linux/types.h>
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define VCPUFREQ_POLICY_LAYOUT	1	/* raised with every change below */

enum vcpufreq_policy_why {
	VCPUFREQ_POLICY_REQUEST,	/* the guest has written a request */
	VCPUFREQ_POLICY_SWITCH,		/* the vCPU comes onto a pCPU; every 4 ms at most */
	VCPUFREQ_POLICY_LOOK,		/* each 100 ms, and for an older request */
};

struct vcpufreq_policy_ask {
	__u64 now_ns;		/* CLOCK_MONOTONIC */
	__u64 woken_ns;		/* since when the vCPU runs after it has slept; 0: not known */
	__u32 why;		/* enum vcpufreq_policy_why */
	__u32 vcpu;
	__u32 pcpu;		/* that it runs on, or ran on last */
	__u32 khz;		/* what its domain requests; 0: nothing */
	__u32 min;		/* the built-in rule's clamp, 0..1024 */
	__u32 max;
	__u32 limit;		/* the highest `min` that the VM gets */
	__u32 floor;		/* the lowest */
	__u32 own_util;		/* of the vCPU's thread, 0..1024 */
	__u32 others_util;	/* of what else runs on its pCPU, 0..1024 */
	__u32 number;		/* of the policy that is asked */
	__u32 pad;
};

struct vcpufreq_policy_answer {
	__u32 min;		/* 0..1024, as uclamp.min */
	__u32 max;		/* min..1024, as uclamp.max */
	__u32 defer;		/* not 0: the VMM's thread sets it, after the guest has gone on */
	__u32 answered;		/* the number of the policy that has answered */
};

/* A question and its answer, in a map. */
struct vcpufreq_policy_call {
	struct vcpufreq_policy_ask ask;
	struct vcpufreq_policy_answer answer;
};

/* What `vcpufreq policy` reads of an object and sets in it. */
struct vcpufreq_policy_setup {
	__u32 layout;
	__u32 number;
};

#define VCPUFREQ_POLICY(name)								\
struct {										\
	__uint(type, BPF_MAP_TYPE_ARRAY);						\
	__uint(max_entries, 1);								\
	__type(key, __u32);								\
	__type(value, struct vcpufreq_policy_call);					\
} policy_calls SEC(".maps");								\
char LICENSE[] SEC("license") = "Dual BSD/GPL";						\
const volatile struct vcpufreq_policy_setup policy_setup SEC(".rodata.policy") = {	\
	.layout = VCPUFREQ_POLICY_LAYOUT,						\
};											\
static __always_inline void name##_policy(const struct vcpufreq_policy_ask *ask,	\
					  struct vcpufreq_policy_answer *answer);	\
SEC("fentry/vcpufreq_policy")								\
int BPF_PROG(name, __u32 slot)								\
{											\
	struct vcpufreq_policy_call *call = bpf_map_lookup_elem(&policy_calls, &slot);	\
											\
	/* Of two that are attached while one replaces the other. */			\
	if (!call || call->ask.number != policy_setup.number)				\
		return 0;								\
	name##_policy(&call->ask, &call->answer);					\
	*(volatile __u32 *)&call->answer.answered = policy_setup.number;		\
	return 0;									\
}											\
static __always_inline void name##_policy(const struct vcpufreq_policy_ask *ask,	\
					  struct vcpufreq_policy_answer *answer)

#endif /* VCPUFREQ_POLICY_H */
