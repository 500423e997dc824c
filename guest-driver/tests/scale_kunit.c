// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of vcpufreq_scale.c: a module of its own, where the kernel has KUnit.
 * The driver must not be loaded: the scale of a CPU is changed, and put back.
 */
#include <kunit/test.h>
#include <linux/module.h>

/* Under test, with its static functions. */
#include "../vcpufreq_ceiling.c"
#include "../vcpufreq_scale.c"

/* Any, up to the most that the driver takes. */
static const u32 highest[] = {
	1, 2, 3, 7, 999, 1024, 1025, 65537, 1803000, 2802000, 4294967293U
};

static struct vcpufreq *device_of(struct kunit *test)
{
	struct vcpufreq *vf = kunit_kzalloc(test, sizeof(*vf), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, vf);
	vf->io.cells = kunit_kzalloc(test, nr_cpu_ids * VCPUFREQ_STRIDE, GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, vf->io.cells);
	return vf;
}

/* The scale after a tick, when it was @before. */
static unsigned long scale_of(struct vcpufreq *vf, u32 perf_max, u32 perf, unsigned long before)
{
	struct vcpufreq_scale *s;
	unsigned long kept, scale;

	preempt_disable();
	kept = this_cpu_read(arch_freq_scale);
	s = this_cpu_ptr(&vcpufreq_scale);
	s->vf = vf;
	s->perf_max = perf_max;
	s->factor = vcpufreq_factor(perf_max);
	*vcpufreq_cell(&vf->io, smp_processor_id(), VCPUFREQ_REG_CUR_PERF) = cpu_to_le32(perf);
	this_cpu_write(arch_freq_scale, before);
	vcpufreq_scale_tick();
	scale = this_cpu_read(arch_freq_scale);
	this_cpu_write(arch_freq_scale, kept);
	preempt_enable();
	return scale;
}

static void each_share_is_that_of_the_highest(struct kunit *test)
{
	struct vcpufreq *vf = device_of(test);
	unsigned int i, step;

	for (i = 0; i < ARRAY_SIZE(highest); i++) {
		u32 max = highest[i];

		for (step = 1; step <= 1000; step++) {
			u32 perf = max_t(u32, div_u64((u64)max * step, 1000), 1);
			u64 exact = div_u64((u64)perf * SCHED_CAPACITY_SCALE, max);
			unsigned long scale = scale_of(vf, max, perf, 0);

			KUNIT_EXPECT_GE(test, scale, max_t(u64, exact, 1));
			KUNIT_EXPECT_LE(test, scale, exact + 1);
			KUNIT_EXPECT_LE(test, scale, SCHED_CAPACITY_SCALE);
		}
	}
}

static void the_highest_and_above_are_full_scale(struct kunit *test)
{
	struct vcpufreq *vf = device_of(test);
	unsigned int i, step;

	for (i = 0; i < ARRAY_SIZE(highest); i++) {
		static const u32 above[] = { 0, U32_MAX - 1, VCPUFREQ_SHM_GONE };
		u32 max = highest[i];

		for (step = 0; step < ARRAY_SIZE(above); step++)
			KUNIT_EXPECT_EQ(test, scale_of(vf, max, max_t(u32, max, above[step]), 0),
					SCHED_CAPACITY_SCALE);
	}
}

static void what_the_host_does_not_know_changes_nothing(struct kunit *test)
{
	struct vcpufreq *vf = device_of(test);

	KUNIT_EXPECT_EQ(test, scale_of(vf, 1803000, 0, 300), 300);
}

static struct kunit_case cases[] = {
	KUNIT_CASE(each_share_is_that_of_the_highest),
	KUNIT_CASE(the_highest_and_above_are_full_scale),
	KUNIT_CASE(what_the_host_does_not_know_changes_nothing),
	{}
};

static struct kunit_suite suite = {
	.name = "vcpufreq_scale",
	.test_cases = cases,
};

kunit_test_suite(suite);

MODULE_DESCRIPTION("KUnit tests of vcpufreq_guest");
MODULE_LICENSE("GPL");
