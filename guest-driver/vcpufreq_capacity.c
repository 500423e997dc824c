// SPDX-License-Identifier: GPL-2.0-only
/*
 * CPU capacities from a device that gives them, for a guest whose firmware
 * doesn't: one that boots by ACPI, or by the device tree of a stock VMM.
 *
 * Load tracking and the balance between CPUs use them. What the scheduler
 * derives once from different capacities, it doesn't: a module can't make the
 * kernel look again, so neither misfit tasks nor energy-aware scheduling come
 * of it. For those the capacities have to be in the device tree.
 */

#include <linux/arch_topology.h>
#include <linux/cpu.h>
#include <linux/math64.h>
#include <linux/percpu.h>
#include <linux/property.h>
#include <linux/sched.h>
#include <linux/topology.h>

#include "vcpufreq.h"

/*
 * The device tree's property counts even if the values are equal now: the
 * kernel multiplies them by the highest frequencies when policies are created.
 */
static bool vcpufreq_firmware_has_capacities(void)
{
	struct device *cpu_dev;
	unsigned int cpu;

	for_each_possible_cpu(cpu) {
		cpu_dev = get_cpu_device(cpu);
		if (cpu_dev && device_property_present(cpu_dev, "capacity-dmips-mhz"))
			return true;
		if (topology_get_cpu_scale(cpu) != SCHED_CAPACITY_SCALE)
			return true;
	}

	return false;
}

/**
 * vcpufreq_capacity_set() - give the CPUs the capacities of the device
 * @vf:		the device
 *
 * Only where nothing else has. As the kernel's own, they are scaled so that the
 * biggest CPU has SCHED_CAPACITY_SCALE, whatever the host has beside.
 */
void vcpufreq_capacity_set(struct vcpufreq *vf)
{
	unsigned int cpu;
	u32 biggest = 0;

	if (!vf->capacity || vcpufreq_firmware_has_capacities())
		return;

	for_each_possible_cpu(cpu)
		biggest = max(biggest, vf->capacity[cpu]);

	for_each_possible_cpu(cpu) {
		u64 capacity = (u64)vf->capacity[cpu] << SCHED_CAPACITY_SHIFT;

		WRITE_ONCE(per_cpu(cpu_scale, cpu), div_u64(capacity, biggest));
	}

	vf->capacity_set = true;
}

/**
 * vcpufreq_capacity_restore() - undo vcpufreq_capacity_set()
 * @vf:		the device
 */
void vcpufreq_capacity_restore(struct vcpufreq *vf)
{
	unsigned int cpu;

	if (!vf->capacity_set)
		return;

	for_each_possible_cpu(cpu)
		WRITE_ONCE(per_cpu(cpu_scale, cpu), SCHED_CAPACITY_SCALE);

	vf->capacity_set = false;
}
