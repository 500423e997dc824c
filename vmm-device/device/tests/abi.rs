// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: the crate has all constants of the C header, with the same values, and a C compiler
//! reads the header as this test does.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use vcpufreq_device as device;

const HEADER: &str = include_str!("../abi/vcpufreq-abi.h");

fn rust_constants() -> BTreeMap<&'static str, u64> {
    let width = u64::try_from(device::REG_WIDTH).expect("a small number");
    let vcpus = u64::try_from(device::MAX_VCPUS).expect("a small number");
    BTreeMap::from([
        ("VCPUFREQ_REG_CUR_PERF", device::REG_CUR_PERF),
        ("VCPUFREQ_REG_SET_PERF", device::REG_SET_PERF),
        ("VCPUFREQ_REG_PERFTBL_LEN", device::REG_PERFTBL_LEN),
        ("VCPUFREQ_REG_PERFTBL_SEL", device::REG_PERFTBL_SEL),
        ("VCPUFREQ_REG_PERFTBL_RD", device::REG_PERFTBL_RD),
        ("VCPUFREQ_REG_PERF_DOMAIN", device::REG_PERF_DOMAIN),
        ("VCPUFREQ_REG_FEATURES", device::REG_FEATURES),
        ("VCPUFREQ_REG_PERF_CAP", device::REG_PERF_CAP),
        ("VCPUFREQ_REG_SHARED_PAGES", device::REG_SHARED_PAGES),
        ("VCPUFREQ_REG_EXTENSIONS", device::REG_FEATURES),
        ("VCPUFREQ_FEATURE_ANY_CPU", device::FEATURE_ANY_CPU.into()),
        ("VCPUFREQ_FEATURE_PERF_CAP", device::FEATURE_PERF_CAP.into()),
        ("VCPUFREQ_FEATURE_CEILING", device::FEATURE_CEILING.into()),
        (
            "VCPUFREQ_FEATURE_SHARED_PAGES",
            device::FEATURE_SHARED_PAGES.into(),
        ),
        (
            "VCPUFREQ_SHARED_PAGE_SHIFT",
            device::SHARED_PAGE_SHIFT.into(),
        ),
        ("VCPUFREQ_CUR_PERF_UNKNOWN", device::CUR_PERF_UNKNOWN.into()),
        ("VCPUFREQ_SET_PERF_KHZ", device::SET_PERF_KHZ.into()),
        ("VCPUFREQ_CEILING_SHIFT", device::CEILING_SHIFT.into()),
        ("VCPUFREQ_CEILING_MS_MAX", device::CEILING_MS_MAX.into()),
        ("VCPUFREQ_REG_WIDTH", width),
        ("VCPUFREQ_STRIDE", device::REGION_STRIDE),
        ("VCPUFREQ_REGION_ALIGN", device::REGION_ALIGN),
        ("VCPUFREQ_PERFTBL_MAX", device::PERFTBL_MAX_LEN.into()),
        ("VCPUFREQ_VCPUS_MAX", vcpus),
    ])
}

/// Name and text of every `#define` of the header that has a value.
fn defines() -> Vec<(&'static str, &'static str)> {
    let lines = HEADER
        .lines()
        .filter_map(|line| line.strip_prefix("#define "));
    let pairs = lines.filter_map(|line| line.split_once(char::is_whitespace));
    pairs
        .map(|(name, rest)| {
            (
                name,
                rest.split_once("/*")
                    .map_or(rest, |(value, _)| value)
                    .trim(),
            )
        })
        .collect()
}

fn number(text: &str) -> u64 {
    let hex = text.strip_prefix("0x");
    hex.map_or_else(|| text.parse(), |hex| u64::from_str_radix(hex, 16))
        .unwrap_or_else(|e| panic!("{text}: {e}"))
}

#[test]
fn header_and_crate_have_the_same_constants() {
    let header: BTreeMap<_, _> = defines()
        .into_iter()
        .filter(|(name, _)| *name != "VCPUFREQ_COMPATIBLE")
        .map(|(name, text)| (name, number(text)))
        .collect();
    assert_eq!(header, rust_constants());
}

#[test]
fn header_names_the_crates_compatible_string() {
    let quoted = format!("\"{}\"", device::COMPATIBLE);
    assert!(defines().contains(&("VCPUFREQ_COMPATIBLE", &quoted)));
}

/// Warnings are shown alone: this is whatever compiler the machine has.
#[test]
fn a_c_compiler_agrees() {
    let checks: Vec<String> = rust_constants()
        .iter()
        .map(|(name, value)| format!("_Static_assert({name} == {value}, \"{name}\");\n"))
        .collect();
    let mut cc = match Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-fsyntax-only", "-xc", "-"])
        .stdin(Stdio::piped())
        .spawn()
    {
        Ok(cc) => cc,
        Err(error) => return println!("SKIP: no C compiler: {error}"),
    };
    let source = format!("{HEADER}\n{}", checks.concat());
    std::io::Write::write_all(&mut cc.stdin.take().unwrap(), source.as_bytes()).unwrap();
    assert!(cc.wait().unwrap().success());
}

#[test]
fn every_register_line_says_direction_and_unit() {
    for line in HEADER
        .lines()
        .filter(|l| l.starts_with("#define VCPUFREQ_REG_"))
    {
        let (_, comment) = line.split_once("/* ").unwrap_or_else(|| panic!("{line}"));
        let directed = ["R  ", "W  ", "-  "].iter().any(|d| comment.starts_with(d));
        let about_one_register = !line.contains("REG_WIDTH");
        assert!(directed || !about_one_register, "{line}");
    }
}
