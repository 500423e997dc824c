// SPDX-License-Identifier: GPL-2.0-only
/*
 * The host's side of a VM's cpufreq device, in the kernel.
 *
 * Reads: each vCPU has a page that the guest sees in a read-only memory slot.
 * Programs on sched_switch and cpu_frequency keep the register cur_perf in it
 * true while the vCPU's thread runs. A vCPU that doesn't run can't read.
 *
 * Writes: a program on kvm_mmio sees address and value in the vCPU's own context,
 * works out the clamp, and has it put into force by the kernel module, before the
 * guest goes on, or by the VMM.
 *
 * There is one set of programs and maps for a VM, and they go with the VMM's
 * process. Cost: each VM adds a call and two comparisons to every switch of
 * the host's; see docs/bpf.md. kvm_mmio has a stub that calls the program
 * in `slots`: exchanging that entry replaces the program between two writes.
 *
 * Wrong when: a driver changes frequencies without telling cpu_frequency
 * (hardware that decides by itself); the CPU lacks FEAT_S2FWB, whose guest
 * would not see what is stored here.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <linux/errno.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#include "kernel.h"
#include "vcpufreq_bpf.h"
#include "arith.h"
#include "vcpufreq-abi.h"

char LICENSE[] SEC("license") = "GPL";

/* Set before loading, but for the layout, which is checked. */
const volatile struct vcpufreq_bpf_setup setup SEC(".rodata.setup") = {
	.layout = VCPUFREQ_BPF_LAYOUT,
	.generation = 1,
};

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

/*
 * A map for each vCPU: a new policy is a new map, and a reader keeps the old one
 * until it is done with it. Both look-ups are a few instructions in place; one
 * in a hash is a hundred.
 */
struct one_policy {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct vcpufreq_bpf_policy);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);		/* vCPUs */
	__type(key, __u32);
	__array(values, struct one_policy);
} policies SEC(".maps");

/* Threads of the VMM that are vCPUs. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, VCPUFREQ_VCPUS_MAX);
	__type(key, __u32);
	__type(value, __u32);
} threads SEC(".maps");

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

/* The program that is in force, for the stub. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} slots SEC(".maps");

/* The module's, see host-bpf/module/. */
extern int vcpufreq_host_request(__u32 domain, __u32 vcpu, __u32 min, __u32 max,
				 __u64 since_ns) __ksym __weak;

static __always_inline void count(__u64 *counter)
{
	__sync_fetch_and_add(counter, 1);
}

static __always_inline const struct vcpufreq_bpf_policy *policy_of(__u32 id)
{
	void *own = bpf_map_lookup_elem(&policies, &id);
	__u32 zero = 0;

	return own ? bpf_map_lookup_elem(own, &zero) : NULL;
}

static __always_inline __u32 bucket(__u64 ns)
{
	__u32 n = 0;

#pragma unroll
	for (int step = 16; step; step /= 2) {
		if (ns >> step) {
			ns >>= step;
			n += step;
		}
	}
	return n & (VCPUFREQ_BPF_BUCKETS - 1);
}

/*
 * Writes cur_perf from what is known, and looks again whether that is still
 * so: of two that do this at the same time, the last to write is right. The
 * exchanges are full barriers, here and where the inputs change.
 */
__noinline int refresh(__u32 id)
{
	const struct vcpufreq_bpf_policy *policy = policy_of(id);
	struct vcpufreq_bpf_vcpu *vcpu = bpf_map_lookup_elem(&vcpus, &id);
	struct page *page = bpf_map_lookup_elem(&pages, &id);
	struct vcpufreq_bpf_domain *domain;
	struct vcpufreq_bpf_cpu *cpu;
	__u32 key, khz, asked, perf;

	if (!policy || !vcpu || !page)
		return 0;
	domain = bpf_map_lookup_elem(&domains, (void *)&policy->domain);
	if (!domain)
		return 0;
	for (int i = 0; i < 8; i++) {
		asked = READ_ONCE(domain->granted_khz);
		key = READ_ONCE(vcpu->cpu) - 1;
		cpu = bpf_map_lookup_elem(&cpus, &key);
		khz = cpu ? READ_ONCE(cpu->khz) : 0;
		if (policy->report == VCPUFREQ_BPF_REPORT_REQUEST)
			perf = asked ?: policy->perf_max_khz;
		else
			perf = cpu ? perf_on(policy, cpu, khz) : 0;
		if (perf && policy->report == VCPUFREQ_BPF_REPORT_TABLE)
			perf = nearest_entry(policy, perf);
		/* What can't be told stays what it was. */
		if (perf)
			__sync_lock_test_and_set(&page->reg[VCPUFREQ_REG_CUR_PERF / 4], perf);
		if (asked == READ_ONCE(domain->granted_khz) &&
		    key == READ_ONCE(vcpu->cpu) - 1 &&
		    khz == (cpu ? READ_ONCE(cpu->khz) : 0))
			return 0;
	}
	count(&vcpu->unsettled);
	return 0;
}

SEC("tp_btf/sched_switch")
int BPF_PROG(vcpufreq_switch, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	__u32 zero = 0, key = bpf_get_smp_processor_id(), pid, *id;
	struct vcpufreq_bpf_vm *v = bpf_map_lookup_elem(&vm, &zero);
	struct vcpufreq_bpf_vcpu *vcpu;
	struct vcpufreq_bpf_cpu *cpu;
	__u32 tgid = v ? v->tgid : 0;
	bool leaves = prev->tgid == tgid, comes = next->tgid == tgid;

	/* The idle threads are of process 0, as a VM without a thread. */
	if ((!leaves && !comes) || !tgid)
		return 0;
	cpu = bpf_map_lookup_elem(&cpus, &key);
	if (!cpu)
		return 0;
	if (leaves)
		__sync_lock_test_and_set(&cpu->running, 0);
	if (!comes)
		return 0;
	pid = next->pid;
	id = bpf_map_lookup_elem(&threads, &pid);
	vcpu = id ? bpf_map_lookup_elem(&vcpus, id) : NULL;
	if (!vcpu)
		return 0;
	count(&vcpu->switches);
	__sync_lock_test_and_set(&cpu->running, *id + 1);
	__sync_lock_test_and_set(&vcpu->cpu, key + 1);
	refresh(*id);
	return 0;
}

/* The kernel tells each CPU of a policy, also on a fast switch. */
SEC("tp_btf/cpu_frequency")
int BPF_PROG(vcpufreq_frequency, unsigned int khz, unsigned int number)
{
	__u32 key = number, id;
	struct vcpufreq_bpf_cpu *cpu = bpf_map_lookup_elem(&cpus, &key);
	struct vcpufreq_bpf_vcpu *vcpu;
	__u64 since;
	__u32 n;

	if (!cpu)
		return 0;
	__sync_lock_test_and_set(&cpu->khz, khz);
	id = READ_ONCE(cpu->running);
	if (!id--)
		return 0;
	refresh(id);
	vcpu = bpf_map_lookup_elem(&vcpus, &id);
	if (!vcpu)
		return 0;
	count(&vcpu->frequencies);
	since = __sync_lock_test_and_set(&vcpu->moving_ns, 0);
	if (since) {
		n = bucket(bpf_ktime_get_ns() - since);
		__sync_fetch_and_add(&vcpu->freq_after[n], 1);
	}
	return 0;
}

/*
 * Takes a token of a bucket, of which vCPUs may take at the same time: each
 * exchange that fails is another's that didn't. Returns 0, or when to try again.
 */
static __noinline __u64 take_token(__u64 *due_ns, __u64 interval, __u64 burst, __u64 now)
{
	__u64 due = READ_ONCE(*due_ns), from, seen;

	for (int i = 0; i < 16; i++) {
		from = due < now ? now : due;
		if (from - now > burst)
			return due - burst;
		seen = __sync_val_compare_and_swap(due_ns, due, from + interval);
		if (seen == due)
			return 0;
		due = seen;
	}
	/* Lost to others 16 times: the worker has a turn for it. */
	return now;
}

/*
 * 0 if a request may pass, which the vCPU that writes it and the VM pay for;
 * else when it may, and the worker gets the last one.
 */
static __always_inline __u64 limited(__u32 writer, const struct vcpufreq_bpf_policy *policy,
				     __u64 now)
{
	struct vcpufreq_bpf_vcpu *payer = bpf_map_lookup_elem(&vcpus, &writer);
	__u32 zero = 0;
	struct vcpufreq_bpf_vm *v = bpf_map_lookup_elem(&vm, &zero);
	__u64 when;

	if (!policy->interval_ns || !payer || !v)
		return 0;
	when = take_token(&payer->due_ns, policy->interval_ns, policy->burst_ns, now);
	if (when)
		return when;
	when = take_token(&v->due_ns, policy->vm_interval_ns, policy->vm_burst_ns, now);
	if (when)
		__sync_fetch_and_add(&payer->due_ns, -policy->interval_ns);
	return when;
}

static __always_inline void tell_worker(struct vcpufreq_bpf_vcpu *vcpu, __u32 *under_way,
					struct vcpufreq_bpf_event *event)
{
	if (__sync_lock_test_and_set(under_way, 1)) {
		count(&vcpu->coalesced);
		return;
	}
	if (bpf_ringbuf_output(&events, event, sizeof(*event), 0)) {
		/* In this order: who found an event under way is looked for, too. */
		__sync_lock_test_and_set(under_way, 0);
		count(&vcpu->dropped);
		return;
	}
	count(&vcpu->to_worker);
}

/* Whether the vCPU that writes is of the domain that it asks for. */
static __always_inline bool asks_for_own(const struct vcpufreq_bpf_event *event)
{
	const struct vcpufreq_bpf_policy *policy;

	if (event->writer == event->vcpu)
		return true;
	policy = policy_of(event->writer);
	return policy && policy->domain == event->domain;
}

/*
 * Has a clamp put into force by the module, on behalf of the current vCPU.
 * Another vCPU may do so at the same time: whoever comes last looks what is
 * wanted by then. Returns an outcome.
 */
static __always_inline __u32 actuate(struct vcpufreq_bpf_vcpu *vcpu,
				     struct vcpufreq_bpf_domain *domain,
				     struct vcpufreq_bpf_event *event)
{
	bool settled = false;
	__u32 clamp, now;
	int result = 0;

	for (int i = 0; i < 4 && !settled; i++) {
		clamp = READ_ONCE(domain->clamp);
		/* Another's failure has taken it back; this one has not been tried. */
		if (clamp == VCPUFREQ_BPF_NO_CLAMP)
			clamp = event->clamp;
		if (bpf_ksym_exists(vcpufreq_host_request))
			result = vcpufreq_host_request(event->domain, event->writer,
						       clamp & 0xffff, clamp >> 16, event->ns);
		else
			result = -ENOENT;
		if (result < 0)
			break;
		now = READ_ONCE(domain->clamp);
		settled = now == clamp || now == VCPUFREQ_BPF_NO_CLAMP;
	}
	if (settled && result) {
		count(&vcpu->unchanged);
		return VCPUFREQ_BPF_IS_UNCHANGED;
	}
	if (settled) {
		count(&vcpu->in_kernel);
		return VCPUFREQ_BPF_IN_KERNEL;
	}
	/*
	 * Others change it as fast as this can follow; or a writer that clamps mean
	 * nothing to asks for others, to which they do.
	 */
	if (result >= 0 || (result == -EOPNOTSUPP && !asks_for_own(event))) {
		event->kind = VCPUFREQ_BPF_APPLY;
		tell_worker(vcpu, &domain->pending, event);
		return VCPUFREQ_BPF_LEFT_TO_WORKER;
	}
	/* The next request is to try again, whatever it asks for. */
	__sync_lock_test_and_set(&domain->clamp, VCPUFREQ_BPF_NO_CLAMP);
	if (result == -EOPNOTSUPP) {
		count(&vcpu->not_applicable);
		return VCPUFREQ_BPF_IS_NOT_APPLICABLE;
	}
	count(&vcpu->refused);
	return VCPUFREQ_BPF_IS_REFUSED;
}

/* What becomes of a request; `event` has what was asked for, and gets the clamp. */
static __always_inline __u32 answer(struct vcpufreq_bpf_vcpu *vcpu,
				    const struct vcpufreq_bpf_policy *policy,
				    struct vcpufreq_bpf_domain *domain,
				    struct vcpufreq_bpf_event *event)
{
	__u64 now = event->ns, when = limited(event->writer, policy, now);
	bool by_module = policy->actuator == VCPUFREQ_BPF_KFUNC;
	__u32 granted;

	event->clamp = request_to_clamp(policy, event->khz, &granted);
	if (when) {
		count(&vcpu->limited);
		event->kind = VCPUFREQ_BPF_DEFERRED;
		event->ns = when;
		tell_worker(vcpu, &vcpu->deferred, event);
		event->ns = now;
		return VCPUFREQ_BPF_IS_LIMITED;
	}
	__sync_lock_test_and_set(&domain->granted_khz, granted);
	if (policy->report == VCPUFREQ_BPF_REPORT_REQUEST)
		refresh(event->vcpu);
	if (policy->actuator == VCPUFREQ_BPF_NOBODY) {
		count(&vcpu->not_applicable);
		return VCPUFREQ_BPF_IS_NOT_APPLICABLE;
	}
	if (__sync_lock_test_and_set(&domain->clamp, event->clamp) != event->clamp) {
		vcpu->moving_ns = now;
	} else if (!by_module || !asks_for_own(event)) {
		/* Else the module looks whether another process has changed the clamp. */
		count(&vcpu->unchanged);
		return VCPUFREQ_BPF_IS_UNCHANGED;
	}
	if (by_module)
		return actuate(vcpu, domain, event);
	event->kind = VCPUFREQ_BPF_APPLY;
	tell_worker(vcpu, &domain->pending, event);
	return VCPUFREQ_BPF_LEFT_TO_WORKER;
}

/* A write of set_perf of vCPU `id`, whose entry is `vcpu`, by that of `writer`. */
static __always_inline int request(__u32 id, struct vcpufreq_bpf_vcpu *vcpu, __u32 khz,
				   __u32 writer)
{
	const struct vcpufreq_bpf_policy *policy = policy_of(id);
	struct vcpufreq_bpf_event event = { .vcpu = id, .khz = khz, .writer = writer };
	struct vcpufreq_bpf_domain *domain;
	__u64 n;

	if (!policy)
		return 0;
	domain = bpf_map_lookup_elem(&domains, (void *)&policy->domain);
	if (!domain)
		return 0;
	event.domain = policy->domain;
	event.ns = bpf_ktime_get_ns();
	n = __sync_fetch_and_add(&vcpu->requests, 1) + 1;
	count(&vcpu->generations[setup.generation & 1]);
	vcpu->latest_ns = event.ns;
	__sync_lock_test_and_set(&vcpu->latest, n << 32 | khz);

	event.outcome = answer(vcpu, policy, domain, &event);
	if (policy->tell) {
		event.kind = VCPUFREQ_BPF_TOLD;
		if (bpf_ringbuf_output(&events, &event, sizeof(event), 0))
			count(&vcpu->unreported);
	}
	return 0;
}

/*
 * The vCPU that the current thread runs, plus 1; 0: none. vcpufreq_switch has
 * noted that for this CPU, and the thread is on it until the program ends; to
 * ask `threads` would take ten times as long.
 */
static __always_inline __u32 vcpu_here(void)
{
	__u32 key = bpf_get_smp_processor_id();
	struct vcpufreq_bpf_cpu *cpu = bpf_map_lookup_elem(&cpus, &key);

	return cpu ? READ_ONCE(cpu->running) : 0;
}

SEC("tp_btf/kvm_mmio")
int BPF_PROG(vcpufreq_write, int type, int len, __u64 address, void *val)
{
	__u32 zero = 0, id, offset, writer;
	struct vcpufreq_bpf_vm *v = bpf_map_lookup_elem(&vm, &zero);
	struct vcpufreq_bpf_vcpu *vcpu;

	if (!v || bpf_get_current_pid_tgid() >> 32 != v->tgid || address < v->base)
		return 0;
	address -= v->base;
	if (address / VCPUFREQ_STRIDE >= v->vcpus) {
		if (address < (__u64)VCPUFREQ_VCPUS_MAX * VCPUFREQ_STRIDE)
			count(&v->out_of_range);
		return 0;
	}
	id = address / VCPUFREQ_STRIDE;
	offset = address % VCPUFREQ_STRIDE;
	vcpu = bpf_map_lookup_elem(&vcpus, &id);
	if (!vcpu)
		return 0;
	/* A read that left the kernel is told of again when it is answered. */
	if (type != KVM_TRACE_MMIO_WRITE) {
		if (type == KVM_TRACE_MMIO_READ_UNSATISFIED)
			count(&vcpu->reads);
		return 0;
	}
	writer = vcpu_here();
	if (offset != VCPUFREQ_REG_SET_PERF || len != VCPUFREQ_REG_WIDTH || !writer) {
		count(&vcpu->other_writes);
		return 0;
	}
	return request(id, vcpu, bpf_core_cast(val, struct refcount_struct)->refs.counter,
		       writer - 1);
}

SEC("tp_btf/kvm_mmio")
int vcpufreq_stub(void *ctx)
{
	bpf_tail_call(ctx, &slots, 0);
	return 0;
}

/* Run by a vCPU's thread, which this makes known; its next switch tells where. */
SEC("syscall")
int vcpufreq_register(struct vcpufreq_bpf_call *call)
{
	__u64 who = bpf_get_current_pid_tgid();
	__u32 zero = 0, pid = who, id = call->vcpu;
	struct vcpufreq_bpf_vm *v = bpf_map_lookup_elem(&vm, &zero);
	long error;

	if (!v || id >= v->vcpus)
		return -ENOENT;
	error = bpf_map_update_elem(&threads, &pid, &id, BPF_ANY);
	if (!error)
		v->tgid = who >> 32;
	return error;
}

/* After what a page follows from has changed other than by a trace event. */
SEC("syscall")
int vcpufreq_refresh(struct vcpufreq_bpf_call *call)
{
	return refresh(call->vcpu);
}
