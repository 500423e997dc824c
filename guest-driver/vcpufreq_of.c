// SPDX-License-Identifier: GPL-2.0-only
/*
 * Attaches the driver to a device-tree node of the binding
 * "qemu,virtual-cpufreq", as VMMs describe it since Linux 6.13.
 */

#include <linux/err.h>
#include <linux/mod_devicetable.h>
#include <linux/module.h>
#include <linux/platform_device.h>

#include "vcpufreq.h"

static int vcpufreq_of_probe(struct platform_device *pdev)
{
	struct resource *res;
	void __iomem *regs;
	struct vcpufreq *vf;

	regs = devm_platform_get_and_ioremap_resource(pdev, 0, &res);
	if (IS_ERR(regs))
		return dev_err_probe(&pdev->dev, PTR_ERR(regs),
				     "cannot map the register region\n");

	if (!IS_ALIGNED(res->start, VCPUFREQ_STRIDE))
		return dev_err_probe(&pdev->dev, -EINVAL,
				     "register region at %pap isn't aligned to %u\n",
				     &res->start, VCPUFREQ_STRIDE);

	vf = vcpufreq_register(&pdev->dev, regs, resource_size(res));
	if (IS_ERR(vf))
		return PTR_ERR(vf);

	platform_set_drvdata(pdev, vf);

	return 0;
}

static void vcpufreq_of_remove(struct platform_device *pdev)
{
	vcpufreq_unregister(platform_get_drvdata(pdev));
}

static const struct of_device_id vcpufreq_of_match[] = {
	{ .compatible = "qemu,virtual-cpufreq" },
	{ }
};
MODULE_DEVICE_TABLE(of, vcpufreq_of_match);

static struct platform_driver vcpufreq_of_driver = {
	.probe = vcpufreq_of_probe,
	.remove = vcpufreq_of_remove,
	.driver = {
		.name = "vcpufreq-guest",
		.of_match_table = vcpufreq_of_match,
	},
};
module_platform_driver(vcpufreq_of_driver);
