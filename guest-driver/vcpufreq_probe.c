// SPDX-License-Identifier: GPL-2.0-only
/*
 * What the host tells, read once at probe and checked before anything relies
 * on it. A table that is empty, unsorted or has a zero in it would otherwise
 * come back as a division by zero or a wrong frequency long after probe.
 */

#include <linux/device.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include "vcpufreq.h"

static int vcpufreq_check_size(const struct vcpufreq *vf)
{
	unsigned int pages = cpumask_last(cpu_possible_mask) + 1;
	resource_size_t need = (resource_size_t)pages * VCPUFREQ_STRIDE;

	if (vf->io.size >= need)
		return 0;

	return dev_err_probe(vf->dev, -EINVAL,
			     "register region has %pap bytes, %u CPUs need %pap\n",
			     &vf->io.size, pages, &need);
}

static int vcpufreq_check_entry(const struct vcpufreq_domain *domain,
				unsigned int cpu, unsigned int i)
{
	struct device *dev = domain->vf->dev;
	u32 perf = domain->table[i].frequency;
	u32 prev = i ? domain->table[i - 1].frequency : 0;

	if (!perf)
		return dev_err_probe(dev, -EINVAL,
				     "CPU%u: performance table entry %u is 0\n",
				     cpu, i);

	/* Values from here on mean "end" and "invalid" in a cpufreq table. */
	if (perf >= CPUFREQ_TABLE_END)
		return dev_err_probe(dev, -EINVAL,
				     "CPU%u: performance table entry %u is %u, above %u\n",
				     cpu, i, perf, CPUFREQ_TABLE_END - 1);

	if (perf <= prev)
		return dev_err_probe(dev, -EINVAL,
				     "CPU%u: performance table entry %u is %u, not above entry %u, which is %u\n",
				     cpu, i, perf, i - 1, prev);

	return 0;
}

static u32 vcpufreq_read_level(const struct vcpufreq *vf, unsigned int cpu,
			       unsigned int i)
{
	if (vf->io.cells)
		return vcpufreq_read(vf, cpu, VCPUFREQ_SHM_PERFTBL +
					      i * VCPUFREQ_REG_WIDTH);

	vcpufreq_write(vf, cpu, VCPUFREQ_REG_PERFTBL_SEL, i);

	return vcpufreq_read(vf, cpu, VCPUFREQ_REG_PERFTBL_RD);
}

static int vcpufreq_read_table(struct vcpufreq_domain *domain, unsigned int cpu)
{
	const struct vcpufreq *vf = domain->vf;
	u32 len = vcpufreq_read(vf, cpu, VCPUFREQ_REG_PERFTBL_LEN);
	unsigned int i;
	int ret;

	if (!len || len > VCPUFREQ_PERFTBL_MAX)
		return dev_err_probe(vf->dev, -EINVAL,
				     "CPU%u: performance table has %u entries, expected 1 to %u\n",
				     cpu, len, VCPUFREQ_PERFTBL_MAX);

	for (i = 0; i < len; i++) {
		domain->table[i].frequency = vcpufreq_read_level(vf, cpu, i);
		ret = vcpufreq_check_entry(domain, cpu, i);
		if (ret)
			return ret;
	}

	domain->table[len].frequency = CPUFREQ_TABLE_END;
	domain->nr_perf = len;

	return 0;
}

/* Of use only if each level's is known. */
static void vcpufreq_read_power(struct vcpufreq_domain *domain,
				unsigned int cpu)
{
	const struct vcpufreq *vf = domain->vf;
	unsigned int i;

	if (!vf->io.cells)
		return;

	for (i = 0; i < domain->nr_perf; i++) {
		domain->power[i] = vcpufreq_read(vf, cpu, VCPUFREQ_SHM_POWER +
							  i * VCPUFREQ_REG_WIDTH);
		if (!domain->power[i])
			return;
	}

	domain->has_power = true;
}

/* Of use only if each CPU's is known. */
static int vcpufreq_read_capacities(struct vcpufreq *vf)
{
	unsigned int cpu;
	u32 *capacity;

	if (!vf->io.cells)
		return 0;

	capacity = devm_kcalloc(vf->dev, nr_cpu_ids, sizeof(*capacity),
				GFP_KERNEL);
	if (!capacity)
		return -ENOMEM;

	for_each_possible_cpu(cpu) {
		capacity[cpu] = vcpufreq_read(vf, cpu, VCPUFREQ_SHM_CAPACITY);
		if (!capacity[cpu])
			return 0;
		if (capacity[cpu] > SCHED_CAPACITY_SCALE)
			return dev_err_probe(vf->dev, -EINVAL,
					     "CPU%u: capacity is %u, above %lu\n",
					     cpu, capacity[cpu],
					     SCHED_CAPACITY_SCALE);
	}

	vf->capacity = capacity;

	return 0;
}

static struct vcpufreq_domain *vcpufreq_find_domain(const struct vcpufreq *vf,
						    u32 id)
{
	unsigned int cpu;

	for_each_possible_cpu(cpu)
		if (vf->domain[cpu] && vf->domain[cpu]->id == id)
			return vf->domain[cpu];

	return NULL;
}

/* The CPUs of a policy have one table, so those of a domain must agree. */
static int vcpufreq_check_same(const struct vcpufreq_domain *domain,
			       const struct vcpufreq_domain *other,
			       unsigned int cpu)
{
	unsigned int first = cpumask_first(&domain->cpus);
	struct device *dev = domain->vf->dev;
	unsigned int i;

	if (domain->nr_perf != other->nr_perf)
		return dev_err_probe(dev, -EINVAL,
				     "domain %u: CPU%u has %u performance levels, CPU%u has %u\n",
				     domain->id, first, domain->nr_perf, cpu,
				     other->nr_perf);

	for (i = 0; i < domain->nr_perf; i++)
		if (domain->table[i].frequency != other->table[i].frequency)
			return dev_err_probe(dev, -EINVAL,
					     "domain %u: performance table entry %u is %u for CPU%u, %u for CPU%u\n",
					     domain->id, i,
					     domain->table[i].frequency, first,
					     other->table[i].frequency, cpu);

	return 0;
}

static int vcpufreq_read_cpu(struct vcpufreq *vf, unsigned int cpu)
{
	struct vcpufreq_domain *domain, *known;
	int ret;

	domain = devm_kzalloc(vf->dev, sizeof(*domain), GFP_KERNEL);
	if (!domain)
		return -ENOMEM;

	domain->vf = vf;
	domain->host_cap = FREQ_QOS_MAX_DEFAULT_VALUE;
	domain->renew_at = jiffies;
	raw_spin_lock_init(&domain->lock);
	domain->id = vcpufreq_read(vf, cpu, VCPUFREQ_REG_PERF_DOMAIN);

	ret = vcpufreq_read_table(domain, cpu);
	if (ret)
		return ret;
	vcpufreq_read_power(domain, cpu);

	known = vcpufreq_find_domain(vf, domain->id);
	if (known) {
		ret = vcpufreq_check_same(known, domain, cpu);
		devm_kfree(vf->dev, domain);
		domain = known;
	}

	vf->domain[cpu] = domain;
	cpumask_set_cpu(cpu, &domain->cpus);

	return ret;
}

/**
 * vcpufreq_read_host() - read the tables and domains of all possible CPUs
 * @vf:		device whose registers are mapped; gets its domains
 *
 * Return: 0, -ENOMEM, or -EINVAL when a check failed, with a message that
 * names the check and the CPU.
 */
int vcpufreq_read_host(struct vcpufreq *vf)
{
	unsigned int cpu;
	u32 features;
	int ret;

	ret = vcpufreq_check_size(vf);
	if (ret)
		return ret;

	vf->domain = devm_kcalloc(vf->dev, nr_cpu_ids, sizeof(*vf->domain),
				  GFP_KERNEL);
	if (!vf->domain)
		return -ENOMEM;

	for_each_possible_cpu(cpu) {
		ret = vcpufreq_read_cpu(vf, cpu);
		if (ret)
			return ret;
	}

	/* Equal in all pages; 0 on a host that knows nothing of it. */
	features = vcpufreq_read(vf, 0, VCPUFREQ_REG_FEATURES);
	vf->any_cpu = features & VCPUFREQ_FEATURE_ANY_CPU;
	vf->has_caps = features & VCPUFREQ_FEATURE_PERF_CAP;
	vf->has_ceilings = features & VCPUFREQ_FEATURE_CEILING;
	vf->has_pages = features & VCPUFREQ_FEATURE_SHARED_PAGES;

	return vcpufreq_read_capacities(vf);
}
