// SPDX-License-Identifier: GPL-2.0-only
/*
 * The module's ways to find a device. Which comes first is no matter: the
 * system has one cpufreq driver, so a second device is refused.
 */

#include <linux/module.h>
#include <linux/pci.h>
#include <linux/platform_device.h>

#include "vcpufreq.h"

static int __init vcpufreq_module_init(void)
{
	int ret;

	ret = platform_driver_register(&vcpufreq_of_driver);
	if (ret)
		return ret;

	/* Does nothing on a kernel without PCI. */
	ret = pci_register_driver(&vcpufreq_pci_driver);
	if (ret)
		platform_driver_unregister(&vcpufreq_of_driver);

	return ret;
}
module_init(vcpufreq_module_init);

static void __exit vcpufreq_module_exit(void)
{
	pci_unregister_driver(&vcpufreq_pci_driver);
	platform_driver_unregister(&vcpufreq_of_driver);
}
module_exit(vcpufreq_module_exit);
