// SPDX-License-Identifier: GPL-2.0-only
/* Runs the arithmetic of the programs over a range of values, in the kernel. */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "../vcpufreq_bpf.h"
#include "../arith.h"

char LICENSE[] SEC("license") = "GPL";

#define RESULTS	16384

struct inputs {
	struct vcpufreq_bpf_policy policy;
	struct vcpufreq_bpf_cpu cpu;
	__u32 from;		/* kHz of the first result */
	__u32 step;		/* to the next one */
};

struct result {
	__u32 clamp;
	__u32 granted;
	__u32 perf;
	__u32 entry;
	__u32 bounded;		/* the clamp, within bounds that follow from the kHz */
};

/* In one value, which is read in one go. */
struct result_list {
	struct result of[RESULTS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct inputs);
} inputs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct result_list);
} results SEC(".maps");

static int one(__u32 n, struct inputs **in)
{
	__u32 zero = 0;
	struct result_list *list = bpf_map_lookup_elem(&results, &zero);
	struct inputs *from = *in;
	struct result *result;
	__u32 khz;

	if (!list || !from || n >= RESULTS)
		return 1;
	result = &list->of[n];
	khz = from->from + n * from->step;
	result->clamp = request_to_clamp(&from->policy, khz, &result->granted);
	result->perf = perf_on(&from->policy, &from->cpu, khz);
	result->entry = nearest_entry(&from->policy, khz);
	result->bounded = bounded(&from->policy,
				  VCPUFREQ_BPF_CLAMP(khz & 511, 512 + (khz >> 9 & 511)),
				  result->clamp);
	return 0;
}

SEC("syscall")
int compute(void *ctx)
{
	__u32 zero = 0;
	struct inputs *in = bpf_map_lookup_elem(&inputs, &zero);

	if (!in)
		return 1;
	return bpf_loop(RESULTS, one, &in, 0) == RESULTS ? 0 : 1;
}
