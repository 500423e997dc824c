# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
SUMMARY = "CPU frequency of KVM guests, connected with the host's"
DESCRIPTION = "The program: runs and serves guests, and tunes a host for real-time guests."
HOMEPAGE = "file://${VCPUFREQ_SOURCE}/README.md"
BUGTRACKER = "file://${VCPUFREQ_SOURCE}/SECURITY.md"
SECTION = "admin"
LICENSE = "(Apache-2.0 OR BSD-3-Clause) AND GPL-2.0-only"
LIC_FILES_CHKSUM = "\
    file://LICENSES/Apache-2.0.txt;md5=3b83ef96387f14655fc854ddc3c6bd57 \
    file://LICENSES/BSD-3-Clause.txt;md5=2f4d879dbd418845bae24ee14faa0953 \
    file://LICENSES/GPL-2.0-only.txt;md5=b234ee4d69f5fce4486a80fdaf4a4263 \
"
CVE_PRODUCT = "vcpufreq"

EXTERNALSRC = "${VCPUFREQ_SOURCE}"

inherit cargo cargo-update-recipe-crates externalsrc pkgconfig systemd

require ${BPN}-crates.inc

# The path "bpf" needs libbpf, which meta-oe has.
PACKAGECONFIG ??= "${@bb.utils.contains('BBFILE_COLLECTIONS', 'openembedded-layer', 'bpf', '', d)}"
PACKAGECONFIG[bpf] = ",,clang-native elfutils libbpf zlib zstd"
# clang compiles for BPF, and knows no sysroot: else it would find the build machine's headers.
export BPF_INCLUDE = "${STAGING_INCDIR}"
CARGO_BUILD_FLAGS += "--package vcpufreq --bin vcpufreq"
CARGO_BUILD_FLAGS += "${@bb.utils.contains('PACKAGECONFIG', 'bpf', '', '--no-default-features', d)}"

SYSTEMD_SERVICE:${PN} = "vcpufreq-serve@.socket"
SYSTEMD_AUTO_ENABLE:${PN} = "disable"

do_install:append() {
    install -d ${D}${systemd_system_unitdir}
    install -m 0644 ${S}/docs/vcpufreq@.service ${D}${systemd_system_unitdir}/
    install -m 0644 ${S}/docs/vcpufreq-serve@.service ${D}${systemd_system_unitdir}/
    install -m 0644 ${S}/docs/vcpufreq-serve@.socket ${D}${systemd_system_unitdir}/
}

FILES:${PN} += "${systemd_system_unitdir}"
# Measure, for "vcpufreq rt report".
RRECOMMENDS:${PN} += "iputils-ping rt-tests stress-ng"
