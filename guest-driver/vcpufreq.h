/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Guest side of the vcpufreq bridge: what the files of the driver share.
 *
 * vcpufreq_of.c     finds the registers in the device tree
 * vcpufreq_probe.c  reads what the host tells, and checks all of it
 * vcpufreq_core.c   the cpufreq driver: requests to the host
 * vcpufreq_scale.c  frequency invariance: what the host gives, each tick
 * vcpufreq_em.c     energy model from the device tree's OPPs
 */
#ifndef VCPUFREQ_H
#define VCPUFREQ_H

#include <linux/cpufreq.h>
#include <linux/cpumask.h>
#include <linux/io.h>
#include <linux/types.h>

#include "vcpufreq-abi.h"

struct device;
struct vcpufreq;

/**
 * struct vcpufreq_domain - CPUs whose performance the host sets together
 * @vf:		the device that this domain belongs to
 * @id:		the number that the host gives it in perf_domain
 * @nr_perf:	entries in @table; 1 means that any value up to it can be asked
 * @cpus:	possible CPUs with this number; they form one cpufreq policy
 * @has_opps:	the CPUs' OPPs were added from the device tree
 * @em_usable:	those OPPs agree with @table, so an energy model can be made
 * @table:	performance levels in kHz, rising, closed by CPUFREQ_TABLE_END
 */
struct vcpufreq_domain {
	const struct vcpufreq *vf;
	u32 id;
	unsigned int nr_perf;
	cpumask_t cpus;
	bool has_opps;
	bool em_usable;
	struct cpufreq_frequency_table table[VCPUFREQ_PERFTBL_MAX + 1];
};

/**
 * struct vcpufreq - one device, as found by a way of attaching
 * @dev:	where messages and allocations go
 * @regs:	register pages, one per CPU, by CPU number
 * @any_cpu:	a CPU may ask for a domain that it isn't of
 * @driver:	the cpufreq driver registered for this device
 * @domain:	the domain of each possible CPU, by CPU number
 */
struct vcpufreq {
	struct device *dev;
	void __iomem *regs;
	bool any_cpu;
	struct cpufreq_driver driver;
	struct vcpufreq_domain **domain;
};

/*
 * The only two places that form a register's address. Relaxed, because no
 * memory of the guest is ordered against these registers.
 */
static inline u32 vcpufreq_read(const struct vcpufreq *vf, unsigned int cpu,
				unsigned int reg)
{
	return readl_relaxed(vf->regs + cpu * VCPUFREQ_STRIDE + reg);
}

static inline void vcpufreq_write(const struct vcpufreq *vf, unsigned int cpu,
				  unsigned int reg, u32 value)
{
	writel_relaxed(value, vf->regs + cpu * VCPUFREQ_STRIDE + reg);
}

/* Highest performance of a CPU in @domain, in kHz; checked to be above 0. */
static inline u32 vcpufreq_perf_max(const struct vcpufreq_domain *domain)
{
	return domain->table[domain->nr_perf - 1].frequency;
}

static inline bool vcpufreq_has_table(const struct vcpufreq_domain *domain)
{
	return domain->nr_perf > 1;
}

struct vcpufreq *vcpufreq_register(struct device *dev, void __iomem *regs,
				   resource_size_t size);
void vcpufreq_unregister(struct vcpufreq *vf);

int vcpufreq_read_host(struct vcpufreq *vf, resource_size_t size);

void vcpufreq_scale_start(const struct vcpufreq_domain *domain);
void vcpufreq_scale_stop(const struct vcpufreq_domain *domain);

void vcpufreq_em_init(struct vcpufreq_domain *domain);
void vcpufreq_em_register(struct cpufreq_policy *policy);
void vcpufreq_em_exit(struct vcpufreq_domain *domain);

#endif /* VCPUFREQ_H */
