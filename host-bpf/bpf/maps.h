/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The maps of a VM's programs.
 */
#ifndef VCPUFREQ_MAPS_H
#define VCPUFREQ_MAPS_H

/* Input: the VM, its pCPUs and policies. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct vcpufreq_bpf_vm);
} vm SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);		/* possible CPUs */
	__type(key, __u32);
	__type(value, struct vcpufreq_bpf_cpu);
} cpus SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);		/* vCPUs */
	__type(key, __u32);
	__type(value, struct vcpufreq_bpf_policy);
} policies SEC(".maps");

/* The thread of each vCPU; 0: none yet. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);		/* vCPUs */
	__type(key, __u32);
	__type(value, __u32);
} tids SEC(".maps");

/* Output: what the guest reads, the VMM's copy of each request, and events. */
struct page {
	__u32 reg[1024];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 16);	/* vCPUs, padded to 64 KiB */
	__type(key, __u32);
	__type(value, struct page);
} pages SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);		/* vCPUs */
	__type(key, __u32);
	__type(value, struct vcpufreq_bpf_vcpu);
} vcpus SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);		/* domains */
	__type(key, __u32);
	__type(value, struct vcpufreq_bpf_domain);
} domains SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 262144);
} events SEC(".maps");

static __always_inline void count(__u64 *counter)
{
	__sync_fetch_and_add(counter, 1);
}

static __always_inline const struct vcpufreq_bpf_policy *policy_of(__u32 id)
{
	return bpf_map_lookup_elem(&policies, &id);
}

/* The VM's vCPU that runs on a pCPU, plus 1; 0: none does. */
static __always_inline __u32 own_vcpu(const struct vcpufreq_bpf_vm *v, __u32 number)
{
	__u32 place = place_on(number);

	return place >> 16 == v->slot ? place & 0xffff : 0;
}

static __always_inline __u32 vcpu_on(__u32 number)
{
	__u32 zero = 0;
	struct vcpufreq_bpf_vm *v = bpf_map_lookup_elem(&vm, &zero);

	return v ? own_vcpu(v, number) : 0;
}

#endif /* VCPUFREQ_MAPS_H */
