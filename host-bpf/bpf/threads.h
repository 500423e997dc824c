/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A VM's threads by its vCPUs' numbers, and what they ask of `scx`.
 */
#ifndef VCPUFREQ_THREADS_H
#define VCPUFREQ_THREADS_H

/*
 * Set before loading: whether an actuator is `scx`. If none is, the verifier does
 * not look at that code, which takes it two thirds of all its time.
 */
const volatile bool by_scx SEC(".rodata.scx") = true;

struct task_struct *bpf_task_from_pid(__s32 pid) __ksym;
void bpf_task_release(struct task_struct *p) __ksym;

/* The thread of a vCPU, to be released; NULL: it has none, or that has another vCPU by now. */
static __always_inline struct task_struct *thread_of(const struct vcpufreq_bpf_vm *v, __u32 id)
{
	__u32 *tid = bpf_map_lookup_elem(&tids, &id);
	struct vcpufreq_dispatch_thread *thread;
	struct task_struct *p;

	p = tid && *tid ? bpf_task_from_pid(*tid) : NULL;
	if (!p)
		return NULL;
	/* A number is used again, also by another VM. */
	thread = bpf_task_storage_get(&threads, p, NULL, 0);
	if (thread && thread->place == VCPUFREQ_PLACE(v->slot, id))
		return p;
	bpf_task_release(p);
	return NULL;
}

/* What a domain asks for within its bounds; no clamp is known at first. */
static __always_inline __u32 scx_wanted(const struct vcpufreq_bpf_policy *policy, __u32 bounds,
					__u32 clamp)
{
	if (clamp == VCPUFREQ_BPF_NO_CLAMP)
		clamp = VCPUFREQ_BPF_CLAMP(0, 1024);
	return bounded(policy, bounds, clamp) & 0xffff;
}

/*
 * Has every vCPU of a domain ask for what the domain wants. Returns 1; 0 when
 * the service's scheduler is gone, and clamps are to do it, or when the worker is
 * to try: others ask as fast as this can follow, or have failed. `own` is the
 * current thread's vCPU, plus 1; 0 if it has none.
 */
__noinline int ask_scx(__u32 number, __u32 own)
{
	struct vcpufreq_bpf_domain *domain = bpf_map_lookup_elem(&domains, &number);
	const struct vcpufreq_bpf_policy *policy;
	__u32 zero = 0, id, clamp, bounds, wanted;
	struct vcpufreq_bpf_vm *v = bpf_map_lookup_elem(&vm, &zero);
	struct task_struct *p;

	if (!by_scx || !v || !domain || !scx_is_on())
		return 0;
	for (int i = 0; i < 4; i++) {
		bounds = READ_ONCE(domain->bounds);
		clamp = READ_ONCE(domain->clamp);
		/* Another's failure has taken it back: the worker looks what is wanted. */
		if (clamp == VCPUFREQ_BPF_NO_CLAMP)
			return 0;
		bpf_for(id, 0, v->vcpus) {
			policy = policy_of(id);
			if (!policy || policy->domain != number)
				continue;
			wanted = scx_wanted(policy, bounds, clamp);
			/* To find a thread by its number takes longer. */
			if (id + 1 == own) {
				scx_request(bpf_get_current_task_btf(), wanted);
				continue;
			}
			p = thread_of(v, id);
			if (!p)
				continue;
			scx_request(p, wanted);
			bpf_task_release(p);
		}
		/* Else another vCPU has stored a newer one meanwhile. */
		if (clamp == READ_ONCE(domain->clamp) && bounds == READ_ONCE(domain->bounds))
			return 1;
	}
	return 0;
}

/*
 * Makes a vCPU's thread one like others, on the pCPU that it runs on too. Should
 * it move at this moment, its next switch does that.
 */
static __always_inline void forget_thread(const struct vcpufreq_bpf_vm *v, __u32 id)
{
	__u32 is = VCPUFREQ_PLACE(v->slot, id);
	struct task_struct *p = thread_of(v, id);
	struct vcpufreq_dispatch_thread *thread;
	struct vcpufreq_dispatch_vcpus *on;

	if (!p)
		return;
	thread = bpf_task_storage_get(&threads, p, NULL, 0);
	if (thread)
		__sync_lock_test_and_set(&thread->place, 0);
	on = dispatch_on(p->thread_info.cpu);
	if (on)
		__sync_val_compare_and_swap(&on->place, is, 0);
	if (by_scx) {
		scx_request(p, 0);
		scx_leave(p);
	}
	bpf_task_release(p);
}

/* Thread `p`, a vCPU of this domain, asks for what that has wanted before. */
static __always_inline int join_scx(struct task_struct *p,
				    const struct vcpufreq_bpf_policy *policy)
{
	struct vcpufreq_bpf_domain *domain =
		bpf_map_lookup_elem(&domains, (void *)&policy->domain);
	int result = scx_register(p);
	__u32 clamp, bounds;

	for (int i = 0; i < 4 && domain && !result; i++) {
		bounds = READ_ONCE(domain->bounds);
		clamp = READ_ONCE(domain->clamp);
		scx_request(p, scx_wanted(policy, bounds, clamp));
		if (clamp == READ_ONCE(domain->clamp) && bounds == READ_ONCE(domain->bounds))
			break;
	}
	return result;
}

#endif /* VCPUFREQ_THREADS_H */
