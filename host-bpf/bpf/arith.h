/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The arithmetic of vmm-device/device/src/policy.rs, in 64 bits. The lab's scenario
 * bpf-arithmetic compares the two.
 */
#ifndef VCPUFREQ_ARITH_H
#define VCPUFREQ_ARITH_H

#include <stdbool.h>

#include "vcpufreq-abi.h"

/*
 * floor(capacity * khz / reference), times the headroom's fraction: below 2^45;
 * and not below the VMM's lower bound.
 */
static __always_inline __u32 request_to_clamp(const struct vcpufreq_bpf_policy *p,
					      __u32 khz, __u32 *granted)
{
	bool ceilings = p->clamp == VCPUFREQ_BPF_CEILINGS;
	bool exact = p->clamp == VCPUFREQ_BPF_EXACT || (ceilings && khz > VCPUFREQ_SET_PERF_KHZ);
	__u64 num, den;
	__u32 min, max;

	if (ceilings)
		khz &= VCPUFREQ_SET_PERF_KHZ;
	*granted = khz;
	if (!khz)
		return VCPUFREQ_BPF_CLAMP(p->floor, 1024);
	if (khz > p->perf_max_khz)
		*granted = p->perf_max_khz;
	num = (__u64)p->capacity * *granted * p->headroom_num;
	den = (__u64)p->reference_khz * p->headroom_den;
	min = den ? num / den : 0;
	if (min > 1024)
		min = 1024;
	if (min < p->floor)
		min = p->floor;
	max = exact ? min : 1024;
	return VCPUFREQ_BPF_CLAMP(min, max);
}

/*
 * A request's lower bound and what else the pCPU has to do, but no more than the
 * vCPU could ask for by itself.
 */
static __always_inline __u32 summed(const struct vcpufreq_bpf_policy *p, __u32 min, __u32 others)
{
	__u32 sum = min + others;

	if (sum > p->limit)
		sum = p->limit;
	return sum > min ? sum : min;
}

/* A clamp within `bounds`, but not below the VMM's lower bound. */
static __always_inline __u32 bounded(const struct vcpufreq_bpf_policy *p, __u32 bounds,
				     __u32 clamp)
{
	__u32 low = bounds & 0xffff, high = bounds >> 16;
	__u32 min = clamp & 0xffff, max = clamp >> 16;

	if (min > high)
		min = high;
	if (min < low)
		min = low;
	if (max > high)
		max = high;
	if (max < low)
		max = low;
	if (min < p->floor)
		min = p->floor;
	if (max < min)
		max = min;
	return VCPUFREQ_BPF_CLAMP(min, max);
}

/*
 * reference(vCPU) * capacity(pCPU) * khz / (reference(pCPU) * capacity(vCPU)),
 * at least 1; 0 when it isn't known. The product has up to 74 bits: khz is taken in two
 * halves, and what the first leaves goes into the second.
 */
static __always_inline __u32 perf_on(const struct vcpufreq_bpf_policy *p,
				     const struct vcpufreq_bpf_cpu *c, __u32 khz)
{
	__u64 num = (__u64)p->reference_khz * c->capacity;
	__u64 den = (__u64)c->reference_khz * p->capacity;
	__u64 whole, part, high, low;

	if (!khz || !den)
		return 0;
	if (num == den)
		return khz;
	whole = num / den;
	part = num % den;
	high = part * (khz >> 16);
	low = ((high % den) << 16) + part * (khz & 0xffff);
	whole = whole * khz + ((high / den) << 16) + low / den;
	if (whole > 0xffffffff)
		return 0xffffffff;
	return whole ?: 1;
}

/*
 * The entry of the table that is nearest; of two, the higher. A table of one
 * entry has no steps. Global, as other functions here: the verifier looks at it
 * once, not for each call.
 */
__noinline __u32 nearest_entry(const struct vcpufreq_bpf_policy *p, __u32 khz)
{
	__u32 found = khz, least = 0xffffffff, entry, apart;

	if (!p || p->table_len == 1)
		return khz;
	for (__u32 i = 0; i < VCPUFREQ_BPF_TABLE_MAX && i < p->table_len; i++) {
		entry = p->table_khz[i];
		apart = entry > khz ? entry - khz : khz - entry;
		if (apart > least)
			break;
		least = apart;
		found = entry;
	}
	return found;
}

#endif /* VCPUFREQ_ARITH_H */
