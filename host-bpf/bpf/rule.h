/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * When an operator's policy decides: at each request, at a switch to a vCPU, and when the
 * VMM looks. A VM that has never had one reads a zero, and no more.
 */
#ifndef VCPUFREQ_RULE_H
#define VCPUFREQ_RULE_H

/*
 * The clamp of a vCPU's domain by the VM's policy, where the built-in rule makes `clamp`.
 * `ask` has what the caller knows of the request.
 */
static __always_inline __u32 decided(const struct vcpufreq_bpf_vm *v,
				     struct vcpufreq_bpf_vcpu *vcpu,
				     const struct vcpufreq_bpf_policy *policy,
				     struct vcpufreq_bpf_domain *domain, __u32 slot,
				     struct vcpufreq_policy_ask *ask, __u32 clamp, bool *defer)
{
	enum policy_outcome outcome;

	ask->number = READ_ONCE(v->policy);
	ask->woken_ns = READ_ONCE(vcpu->woken_ns);
	ask->pcpu = READ_ONCE(vcpu->cpu) - 1;
	ask->own_util = READ_ONCE(vcpu->own_util);
	ask->others_util = READ_ONCE(vcpu->others_util);
	domain->decided_by = ask->number;
	domain->decided_ns = ask->now_ns;
	if (!(ask->number & 1))
		return clamp;
	count(&vcpu->asked);
	outcome = ask_policy(policy, slot, ask, &clamp, defer);
	if (outcome == POLICY_BOUNDED)
		count(&vcpu->bounded);
	if (outcome == POLICY_SILENT) {
		count(&vcpu->silent);
		/* The next look asks again. */
		domain->decided_ns = 0;
	}
	return clamp;
}

/* Decides about a request; whether the VMM is to set its clamp. */
static __always_inline bool decide_request(const struct vcpufreq_bpf_vm *v,
					   struct vcpufreq_bpf_vcpu *vcpu,
					   struct vcpufreq_bpf_vcpu *writer,
					   const struct vcpufreq_bpf_policy *policy,
					   struct vcpufreq_bpf_domain *domain,
					   struct vcpufreq_bpf_event *event)
{
	struct vcpufreq_policy_ask ask = {
		.now_ns = event->ns,
		.why = VCPUFREQ_POLICY_REQUEST,
		.vcpu = event->vcpu,
		.khz = event->khz & VCPUFREQ_SET_PERF_KHZ,
	};
	bool defer = false;

	/* Else they are known by now, or of another pCPU. */
	if (!policy->sum && vcpu == writer)
		look_at_load(vcpu, policy, bpf_get_current_task_btf());
	event->clamp = decided(v, vcpu, policy, domain, 2 * event->writer, &ask, event->clamp,
			       &defer);
	return defer;
}

/* Decides again what a domain asks for; whether that changes its clamp, which was `was`. */
static __always_inline bool decide_again(const struct vcpufreq_bpf_vm *v, __u32 id,
					 struct vcpufreq_bpf_vcpu *vcpu,
					 const struct vcpufreq_bpf_policy *policy,
					 struct vcpufreq_bpf_domain *domain, __u32 why, __u32 *was)
{
	struct vcpufreq_policy_ask ask = { .now_ns = bpf_ktime_get_ns(), .why = why, .vcpu = id };
	__u32 slot = why == VCPUFREQ_POLICY_SWITCH ? 2 * id + 1 : 2 * v->vcpus;
	__u32 khz, granted, clamp;
	bool defer;

	*was = READ_ONCE(domain->clamp);
	/* It isn't known: the next request, or the VMM, sets it. */
	if (*was == VCPUFREQ_BPF_NO_CLAMP)
		return false;
	khz = READ_ONCE(domain->granted_khz);
	ask.khz = khz;
	if (READ_ONCE(domain->ceiling_until) > ask.now_ns)
		khz |= 1 << VCPUFREQ_CEILING_SHIFT;
	clamp = request_to_clamp(policy, khz, &granted);
	clamp = decided(v, vcpu, policy, domain, slot, &ask, clamp, &defer);
	/* A request that comes meanwhile has decided for itself. */
	return clamp != *was && __sync_val_compare_and_swap(&domain->clamp, *was, clamp) == *was;
}

/* A vCPU comes onto a pCPU, as the thread `own`: time may have changed what its policy answers. */
static __always_inline void decide_at_switch(struct vcpufreq_bpf_vcpu *vcpu, __u32 id,
					     const struct task_struct *own)
{
	__u32 zero = 0, was, now;
	const struct vcpufreq_bpf_vm *v = bpf_map_lookup_elem(&vm, &zero);
	const struct vcpufreq_bpf_policy *policy;
	struct vcpufreq_bpf_domain *domain;
	__u64 ns, slept;

	if (!v || !READ_ONCE(v->policy))
		return;
	policy = policy_of(id);
	if (!policy)
		return;
	domain = bpf_map_lookup_elem(&domains, (void *)&policy->domain);
	if (!domain)
		return;
	ns = bpf_ktime_get_ns();
	slept = own->nvcsw;
	if (vcpu->slept != slept) {
		vcpu->slept = slept;
		vcpu->woken_ns = ns;
	}
	if (domain->decided_by == READ_ONCE(v->policy) && ns - domain->decided_ns < REFRESH_NS)
		return;
	look_at_load(vcpu, policy, own);
	if (!decide_again(v, id, vcpu, policy, domain, VCPUFREQ_POLICY_SWITCH, &was))
		return;
	now = READ_ONCE(domain->clamp);
	/* Without room the next look decides again. */
	if (!tell_refresh(policy, domain, id, ns)) {
		domain->decided_ns = 0;
		__sync_val_compare_and_swap(&domain->clamp, now, was);
	}
}

/* For the VMM, which applies what comes of it. */
static __always_inline void decide_for_vmm(__u32 id)
{
	const struct vcpufreq_bpf_policy *policy = policy_of(id);
	struct vcpufreq_bpf_vcpu *vcpu = bpf_map_lookup_elem(&vcpus, &id);
	struct vcpufreq_bpf_domain *domain;
	__u32 zero = 0, was;
	const struct vcpufreq_bpf_vm *v = bpf_map_lookup_elem(&vm, &zero);

	if (!v || !policy || !vcpu)
		return;
	domain = bpf_map_lookup_elem(&domains, (void *)&policy->domain);
	if (domain)
		decide_again(v, id, vcpu, policy, domain, VCPUFREQ_POLICY_LOOK, &was);
}

#endif /* VCPUFREQ_RULE_H */
