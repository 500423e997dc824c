// SPDX-License-Identifier: GPL-2.0-only
/*
 * Where a policy is tried before it is in force: the rule as the VM's programs have it,
 * with maps of its own and no guest.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "kernel.h"
#include "vcpufreq-abi.h"
#include "vcpufreq_bpf.h"
#include "arith.h"
#include "decide.h"

char LICENSE[] SEC("license") = "GPL";

/* How the requests that are tried are answered. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct vcpufreq_bpf_policy);
} policies SEC(".maps");

/* Asks about a request. The map has the answer then, and `now_ns` how long it took. */
SEC("syscall")
int vcpufreq_judge(struct vcpufreq_policy_ask *asked)
{
	struct vcpufreq_policy_ask ask = *asked;
	struct vcpufreq_bpf_policy *policy;
	__u32 zero = 0, clamp, granted;
	__u32 outcome;
	bool defer;

	policy = bpf_map_lookup_elem(&policies, &zero);
	if (!policy)
		return -1;
	clamp = request_to_clamp(policy, ask.khz, &granted);
	ask.khz = granted;
	ask.now_ns = bpf_ktime_get_ns();
	outcome = ask_policy(policy, zero, &ask, &clamp, &defer);
	asked->now_ns = bpf_ktime_get_ns() - ask.now_ns;
	return outcome;
}
