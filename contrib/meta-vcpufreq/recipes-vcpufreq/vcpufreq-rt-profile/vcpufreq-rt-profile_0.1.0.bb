# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
SUMMARY = "The host's real-time profile for this machine"
DESCRIPTION = "Chooses the machine's profile and its real-time CPU for vcpufreq rt, at each boot."
HOMEPAGE = "file://${VCPUFREQ_SOURCE}/docs/rt.md"
BUGTRACKER = "file://${VCPUFREQ_SOURCE}/SECURITY.md"
SECTION = "admin"
LICENSE = "Apache-2.0 OR BSD-3-Clause"
LIC_FILES_CHKSUM = "\
    file://${VCPUFREQ_SOURCE}/LICENSES/Apache-2.0.txt;md5=3b83ef96387f14655fc854ddc3c6bd57 \
    file://${VCPUFREQ_SOURCE}/LICENSES/BSD-3-Clause.txt;md5=2f4d879dbd418845bae24ee14faa0953 \
"
CVE_PRODUCT = "vcpufreq"

SRC_URI = "file://vcpufreq-rt.service file://after-rt.conf"

S = "${UNPACKDIR}"

inherit systemd

# Machines of meta-qcom that a profile is for.
COMPATIBLE_MACHINE = "^(qcm6490|qcs615|qcs8300|qcs9100)$"

PACKAGE_ARCH = "${MACHINE_ARCH}"

VCPUFREQ_RT_MACHINE_PROFILE:qcm6490 = "qcs6490"
VCPUFREQ_RT_MACHINE_PROFILE:qcs615 = "iq-615"
VCPUFREQ_RT_MACHINE_PROFILE:qcs8300 = "iq-8275"
VCPUFREQ_RT_MACHINE_PROFILE:qcs9100 = "iq-9075"
# Of the profiles that "vcpufreq rt profiles" lists, or a file's path. Without an override, which
# would come before local.conf's.
VCPUFREQ_RT_PROFILE ?= "${VCPUFREQ_RT_MACHINE_PROFILE}"
# The guest's name, as in "vcpufreq@NAME".
VCPUFREQ_RT_GUEST ?= "guest"

SYSTEMD_SERVICE:${PN} = "vcpufreq-rt.service"

do_install() {
    install -d ${D}${sysconfdir}/vcpufreq ${D}${systemd_system_unitdir}
    # Some of the guide's profiles have no cpuset, without which a real-time guest is refused.
    printf 'profile = "%s"\n\n[guest]\n%s = "%s"\n\n[settings]\ncpuset = "isolated"\n' \
        "${VCPUFREQ_RT_PROFILE}" "${VCPUFREQ_RT_GUEST}" "${QCOM_RT_CPU}" \
        > ${D}${sysconfdir}/vcpufreq/rt.toml
    install -m 0644 ${S}/vcpufreq-rt.service ${D}${systemd_system_unitdir}/
    # Guests, which "vcpufreq" has, start on CPUs that are set apart.
    for unit in vcpufreq@ vcpufreq-serve@; do
        install -d ${D}${systemd_system_unitdir}/$unit.service.d
        install -m 0644 ${S}/after-rt.conf ${D}${systemd_system_unitdir}/$unit.service.d/
    done
}

FILES:${PN} += "${systemd_system_unitdir}"
CONFFILES:${PN} = "${sysconfdir}/vcpufreq/rt.toml"
RDEPENDS:${PN} = "vcpufreq"
