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
 * There is one set of these programs and maps for a VM, and they go with the
 * VMM's process. The programs of dispatch.bpf.c call them with events of the VM's
 * own threads and of the pCPUs that these run on.
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
#include "vcpufreq-abi.h"
#include "vcpufreq_bpf.h"
#include "dispatch.h"
#include "arith.h"
#include "maps.h"
#include "scx.h"
#include "sum.h"
#include "decide.h"
#include "rule.h"
#include "threads.h"

char LICENSE[] SEC("license") = "GPL";

/* Checked before loading. */
const __u32 layout SEC(".rodata.setup") = VCPUFREQ_BPF_LAYOUT;

/* The module's, see host-bpf/module/. */
extern int vcpufreq_host_request(__u32 domain, __u32 vcpu, __u32 min, __u32 max,
				 __u64 since_ns) __ksym __weak;

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
	struct vcpufreq_dispatch_cpu *here;
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
		here = dispatch_cpu(key);
		khz = here ? READ_ONCE(here->khz) : 0;
		if (policy->report == VCPUFREQ_BPF_REPORT_REQUEST)
			perf = asked ?: policy->perf_max_khz;
		else
			perf = cpu ? perf_on(policy, cpu, khz) : 0;
		if (perf && policy->report == VCPUFREQ_BPF_REPORT_TABLE)
			perf = nearest_entry(policy, perf);
		/* An unknown value leaves the register as it was. */
		if (perf)
			__sync_lock_test_and_set(&page->reg[VCPUFREQ_REG_CUR_PERF / 4], perf);
		if (asked == READ_ONCE(domain->granted_khz) &&
		    key == READ_ONCE(vcpu->cpu) - 1 &&
		    khz == (here ? READ_ONCE(here->khz) : 0))
			return 0;
	}
	count(&vcpu->unsettled);
	return 0;
}

/* One of the VM's threads comes onto this pCPU. */
SEC("tp_btf/sched_switch")
int BPF_PROG(vcpufreq_switch, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	__u32 key = bpf_get_smp_processor_id(), id = vcpu_on(key);
	struct vcpufreq_bpf_vcpu *vcpu;

	if (!id--)
		return 0;
	vcpu = bpf_map_lookup_elem(&vcpus, &id);
	if (!vcpu)
		return 0;
	count(&vcpu->switches);
	__sync_lock_test_and_set(&vcpu->cpu, key + 1);
	refresh(id);
	refresh_sum(vcpu, id, next);
	decide_at_switch(vcpu, id, next);
	return 0;
}

/* A pCPU on which one of the VM's threads runs has another frequency. */
SEC("tp_btf/cpu_frequency")
int BPF_PROG(vcpufreq_frequency, unsigned int khz, unsigned int number)
{
	__u32 id = vcpu_on(number), n;
	struct vcpufreq_bpf_vcpu *vcpu;
	__u64 since;

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

/* Where others take tokens at the same time: each exchange that fails is another's that didn't. */
static __noinline __u64 take_token_again(__u64 *due_ns, __u64 interval, __u64 burst, __u64 now)
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

/* Takes a token of a bucket. Returns 0, or when to try again. */
static __always_inline __u64 take_token(__u64 *due_ns, __u64 interval, __u64 burst, __u64 now)
{
	__u64 due = READ_ONCE(*due_ns), from = due < now ? now : due;

	if (from - now > burst)
		return due - burst;
	if (__sync_val_compare_and_swap(due_ns, due, from + interval) == due)
		return 0;
	return take_token_again(due_ns, interval, burst, now);
}

/*
 * 0 if a request may pass, which the vCPU that writes it and the VM pay for;
 * else when it may, and the worker gets the last one.
 */
static __always_inline __u64 limited(struct vcpufreq_bpf_vm *v, struct vcpufreq_bpf_vcpu *payer,
				     const struct vcpufreq_bpf_policy *policy, __u64 now)
{
	__u64 when;

	if (!policy->interval_ns)
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
		/* In this order: a request behind a lost event is found, too. */
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
 * Another vCPU may do so at the same time: the last one looks what is
 * wanted by then. Returns an outcome.
 */
static __always_inline __u32 actuate(struct vcpufreq_bpf_vcpu *vcpu,
				     const struct vcpufreq_bpf_policy *policy,
				     struct vcpufreq_bpf_domain *domain,
				     struct vcpufreq_bpf_event *event)
{
	bool settled = false;
	__u32 clamp, now, bounds, sum;
	__u64 others;
	int result = 0;

	for (int i = 0; i < 4 && !settled; i++) {
		others = READ_ONCE(domain->others);
		bounds = READ_ONCE(domain->bounds);
		clamp = READ_ONCE(domain->clamp);
		/* Another's failure has taken it back; this one has not been tried. */
		if (clamp == VCPUFREQ_BPF_NO_CLAMP)
			clamp = event->clamp;
		sum = clamp_in_force(policy, domain, clamp);
		if (bpf_ksym_exists(vcpufreq_host_request))
			result = vcpufreq_host_request(event->domain, event->writer,
						       sum & 0xffff, sum >> 16, event->ns);
		else
			result = -ENOENT;
		if (result < 0)
			break;
		now = READ_ONCE(domain->clamp);
		settled = (now == clamp && READ_ONCE(domain->others) == others &&
			   READ_ONCE(domain->bounds) == bounds) ||
			  now == VCPUFREQ_BPF_NO_CLAMP;
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

/*
 * The worker ends a ceiling that isn't written again in time. Behind the clamp:
 * the end of an older ceiling would not find this one. If there is no room for
 * the event, the worker finds it when it looks next.
 */
static __always_inline void hold_ceiling(struct vcpufreq_bpf_domain *domain,
					 const struct vcpufreq_bpf_event *request)
{
	struct vcpufreq_bpf_event event = *request;
	__u64 held_ms = event.khz >> VCPUFREQ_CEILING_SHIFT;

	if (__sync_lock_test_and_set(&domain->ceiling_until, event.ns + held_ms * 1000000ull))
		return;
	event.kind = VCPUFREQ_BPF_FIRST_CEILING;
	bpf_ringbuf_output(&events, &event, sizeof(event), 0);
}

/* What becomes of a request; `event` has what was asked for, and gets the clamp. */
static __always_inline __u32 answer(struct vcpufreq_bpf_vm *v, struct vcpufreq_bpf_vcpu *vcpu,
				    struct vcpufreq_bpf_vcpu *writer,
				    const struct vcpufreq_bpf_policy *policy,
				    struct vcpufreq_bpf_domain *domain,
				    struct vcpufreq_bpf_event *event)
{
	__u64 now = event->ns, when = limited(v, writer, policy, now);
	bool by_module = policy->actuator == VCPUFREQ_BPF_KFUNC, moved = false;
	bool ceilings = policy->clamp == VCPUFREQ_BPF_CEILINGS;
	bool own = asks_for_own(event), defer = false;
	__u32 granted, last;
	__u64 before;

	/* When it gets its turn, the guest has written a ceiling again. */
	if (ceilings && when)
		event->khz &= VCPUFREQ_SET_PERF_KHZ;
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
	if (policy->actuator == VCPUFREQ_BPF_NO_ACTUATOR) {
		count(&vcpu->not_applicable);
		return VCPUFREQ_BPF_IS_NOT_APPLICABLE;
	}
	if (policy->sum && own)
		moved = others_changed(writer, event->writer, policy, domain,
				       bpf_get_current_task_btf(), &before);
	if (READ_ONCE(v->policy))
		defer = decide_request(v, vcpu, writer, policy, domain, event);
	last = __sync_lock_test_and_set(&domain->clamp, event->clamp);
	if (ceilings && event->khz > VCPUFREQ_SET_PERF_KHZ)
		hold_ceiling(domain, event);
	if (own)
		share_request(policy, domain);
	if (last != event->clamp || moved) {
		vcpu->moving_ns = now;
	} else if (!by_module || !own) {
		/* Else the module looks whether another process has changed the clamp. */
		count(&vcpu->unchanged);
		return VCPUFREQ_BPF_IS_UNCHANGED;
	}
	if (by_module && !defer)
		return actuate(vcpu, policy, domain, event);
	if (by_scx && !defer && policy->actuator == VCPUFREQ_BPF_SCX &&
	    ask_scx(event->domain, event->writer + 1)) {
		count(&vcpu->in_kernel);
		return VCPUFREQ_BPF_IN_KERNEL;
	}
	event->kind = VCPUFREQ_BPF_APPLY;
	tell_worker(vcpu, &domain->pending, event);
	return VCPUFREQ_BPF_LEFT_TO_WORKER;
}

/* A write of set_perf of vCPU `id`, whose entry is `vcpu`, by that of `writer`. */
static __always_inline int request(struct vcpufreq_bpf_vm *v, __u32 id,
				   struct vcpufreq_bpf_vcpu *vcpu, __u32 khz, __u32 writer)
{
	const struct vcpufreq_bpf_policy *policy = policy_of(id);
	struct vcpufreq_bpf_event event = { .vcpu = id, .writer = writer };
	struct vcpufreq_bpf_vcpu *by = vcpu;
	struct vcpufreq_bpf_domain *domain;
	__u64 n;

	if (writer != id)
		by = bpf_map_lookup_elem(&vcpus, &writer);
	if (!policy || !by)
		return 0;
	domain = bpf_map_lookup_elem(&domains, (void *)&policy->domain);
	if (!domain)
		return 0;
	/* Without ceilings it is a frequency above each maximum. */
	if (policy->clamp != VCPUFREQ_BPF_CEILINGS && khz > VCPUFREQ_SET_PERF_KHZ)
		khz = VCPUFREQ_SET_PERF_KHZ;
	event.khz = khz;
	event.domain = policy->domain;
	event.ns = bpf_ktime_get_ns();
	n = __sync_fetch_and_add(&vcpu->requests, 1) + 1;
	vcpu->latest_ns = event.ns;
	__sync_lock_test_and_set(&vcpu->latest, n << 32 | khz);

	event.outcome = answer(v, vcpu, by, policy, domain, &event);
	if (policy->tell) {
		event.clamp = clamp_in_force(policy, domain, event.clamp);
		event.kind = VCPUFREQ_BPF_HANDLED;
		if (bpf_ringbuf_output(&events, &event, sizeof(event), 0))
			count(&vcpu->unreported);
	}
	return 0;
}

SEC("tp_btf/kvm_mmio")
int BPF_PROG(vcpufreq_write, int type, int len, __u64 address, void *val)
{
	__u32 zero = 0, id, offset, writer;
	struct vcpufreq_bpf_vm *v = bpf_map_lookup_elem(&vm, &zero);
	struct vcpufreq_bpf_vcpu *vcpu;

	if (!v || address < v->base)
		return 0;
	address -= v->base;
	if (address / VCPUFREQ_STRIDE >= v->vcpus)
		return 0;
	id = address / VCPUFREQ_STRIDE;
	offset = address % VCPUFREQ_STRIDE;
	vcpu = bpf_map_lookup_elem(&vcpus, &id);
	if (!vcpu)
		return 0;
	/* A read that left the kernel comes again when it is answered. */
	if (type != KVM_TRACE_MMIO_WRITE) {
		if (type == KVM_TRACE_MMIO_READ_UNSATISFIED)
			count(&vcpu->reads);
		return 0;
	}
	/* The thread is on this pCPU until the program ends. */
	writer = own_vcpu(v, bpf_get_smp_processor_id());
	if (offset != VCPUFREQ_REG_SET_PERF || len != VCPUFREQ_REG_WIDTH || !writer)
		return 0;
	return request(v, id, vcpu, bpf_core_cast(val, struct refcount_struct)->refs.counter,
		       writer - 1);
}

/* Makes `p`, whose number is `tid`, known as a vCPU's thread; its next switch tells where it is. */
static __always_inline int make_known(const struct vcpufreq_bpf_vm *v, __u32 id,
				      struct task_struct *p, __u32 tid)
{
	const struct vcpufreq_bpf_policy *policy = policy_of(id);
	struct vcpufreq_dispatch_thread *thread;

	/* The vCPU may have had another one. */
	forget_thread(v, id);
	thread = bpf_task_storage_get(&threads, p, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!thread)
		return -ENOMEM;
	bpf_map_update_elem(&tids, &id, &tid, BPF_ANY);
	thread->place = VCPUFREQ_PLACE(v->slot, id);
	if (by_scx && policy && policy->actuator == VCPUFREQ_BPF_SCX)
		return join_scx(p, policy);
	return 0;
}

/* Run by a vCPU's thread. */
SEC("syscall")
int vcpufreq_register(struct vcpufreq_bpf_call *call)
{
	__u32 zero = 0, pid = bpf_get_current_pid_tgid(), id = call->vcpu;
	struct vcpufreq_bpf_vm *v = bpf_map_lookup_elem(&vm, &zero);

	if (!v || id >= v->vcpus)
		return -ENOENT;
	return make_known(v, id, bpf_get_current_task_btf(), pid);
}

/* Run for another process' thread, whose requests that process doesn't make by kvm_mmio. */
SEC("syscall")
int vcpufreq_register_other(struct vcpufreq_bpf_call *call)
{
	struct task_struct *p = bpf_task_from_pid(call->tid);
	__u32 zero = 0, id = call->vcpu;
	struct vcpufreq_bpf_vm *v;
	int result = -ENOENT;

	if (!p)
		return -ESRCH;
	v = bpf_map_lookup_elem(&vm, &zero);
	if (v && id < v->vcpus)
		result = make_known(v, id, p, call->tid);
	bpf_task_release(p);
	return result;
}

/* A vCPU's thread goes on without the VM's programs. */
SEC("syscall")
int vcpufreq_leave(struct vcpufreq_bpf_call *call)
{
	__u32 zero = 0;
	struct vcpufreq_bpf_vm *v = bpf_map_lookup_elem(&vm, &zero);

	if (v)
		forget_thread(v, call->vcpu);
	return 0;
}

/* Puts what a domain wants into force by scx. */
SEC("syscall")
int vcpufreq_scx(struct vcpufreq_bpf_call *call)
{
	return ask_scx(call->vcpu, 0) ? 0 : -ENOENT;
}

/* Decides what a vCPU's domain asks for again; the VMM then applies it. One thread runs it. */
SEC("syscall")
int vcpufreq_decide(struct vcpufreq_bpf_call *call)
{
	decide_for_vmm(call->vcpu);
	return 0;
}

/* After what a page follows from has changed other than by a trace event. */
SEC("syscall")
int vcpufreq_refresh(struct vcpufreq_bpf_call *call)
{
	return refresh(call->vcpu);
}
