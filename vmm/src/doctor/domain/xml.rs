// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the XML of a libvirt domain says of vCPUs, memory and devices, as far as it matters to latency
//! and to the bridge. The text is untrusted: each list and number in it is bounded.

use std::collections::BTreeMap;

use anyhow::{Context, anyhow, bail};
use roxmltree::{Document, Node, ParsingOptions};
use vcpufreq_host::CpuList;

use crate::config::MAX_VCPUS;

/// More elements, attributes and texts than a domain with any hardware has.
const NODES: u32 = 50_000;
/// The longest list of CPUs, in bytes.
const LIST: usize = 1024;
/// More CPUs than any kernel has.
const CPUS: u16 = 8192;
/// The largest number of iothreads.
const IOTHREADS: u32 = 512;

/// A domain, as its XML has it. What the XML leaves out is `None`, empty or false.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainXml {
    pub name: String,
    /// The hypervisor: `kvm`, `qemu`.
    pub kind: String,
    /// As QEMU names it: `aarch64`, `x86_64`.
    pub arch: Option<String>,
    /// 1 to [`MAX_VCPUS`].
    pub vcpus: u32,
    /// Those that it starts with.
    pub at_start: u32,
    /// The CPUs of threads that have no list of their own.
    pub cpuset: Option<CpuList>,
    pub pins: BTreeMap<u32, CpuList>,
    /// Each vCPU's policy, as `fifo:1` or `batch`.
    pub policies: BTreeMap<u32, String>,
    pub emulator: Option<CpuList>,
    /// Each iothread's own CPUs.
    pub iothreads: BTreeMap<u32, Option<CpuList>>,
    /// The elements of `<cputune>` that limit CPU time.
    pub quotas: Vec<String>,
    pub locked: bool,
    /// Other processes may map its memory.
    pub shared: bool,
    pub hugepages: bool,
    pub nosharepages: bool,
    /// `none` or a device.
    pub balloon: Option<String>,
    pub cpu_mode: Option<String>,
    pub pmu_off: bool,
    pub timers: Vec<DomainTimer>,
    /// libvirt loads a kernel, without firmware.
    pub has_kernel: bool,
    /// The device tree's path.
    pub dtb: Option<String>,
    pub shmem: Option<DomainShmem>,
    /// `<qemu:override>` makes the device the memory's master.
    pub has_master: bool,
}

/// A `<timer>` of `<clock>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainTimer {
    pub name: String,
    pub is_off: bool,
    pub tickpolicy: String,
}

/// The `<shmem>` named vcpufreq.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainShmem {
    pub is_master: bool,
    pub model: String,
    pub server: Option<String>,
    pub vectors: Option<u32>,
    pub ioeventfd: bool,
}

impl DomainXml {
    /// The domain of an XML text.
    ///
    /// # Errors
    /// In one line: why it is no XML, or no domain, or which value is malformed. A document type is
    /// refused, and with it entities.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let options = ParsingOptions {
            nodes_limit: NODES,
            ..ParsingOptions::default()
        };
        let document = Document::parse_with_options(text, options);
        let document = document.map_err(|error| anyhow!("it is no XML ({error})"))?;
        let root = document.root_element();
        if !root.has_tag_name("domain") {
            bail!(
                "it is a <{}>, and not a <domain> of libvirt",
                root.tag_name().name()
            );
        }
        let vcpu = child(root, "vcpu");
        let backing = |name| at(root, &["memoryBacking", name]).is_some();
        let devices = child(root, "devices");
        let devices = || devices.into_iter().flat_map(|devices| devices.children());
        let timers = all(root, &["clock"], "timer");
        let shmem = devices()
            .find(|node| node.has_tag_name("shmem") && node.attribute("name") == Some("vcpufreq"));
        let tune = child(root, "cputune");
        let vcpus = vcpu.map_or(Ok(1), |node| number(node, node.text(), 1, MAX_VCPUS))?;
        let domain = Self {
            name: text_of(child(root, "name")).context("it has no <name>")?,
            kind: attribute(root, "type"),
            arch: at(root, &["os", "type"])
                .and_then(|node| Some(node.attribute("arch")?.to_owned())),
            vcpus,
            at_start: at_start(root, vcpus)?,
            cpuset: vcpu.map_or(Ok(None), |node| cpus(node, "cpuset"))?,
            iothreads: iothreads(root)?,
            locked: backing("locked"),
            shared: at(root, &["memoryBacking", "access"])
                .is_some_and(|node| node.attribute("mode") == Some("shared")),
            hugepages: backing("hugepages"),
            nosharepages: backing("nosharepages"),
            balloon: devices()
                .find(|node| node.has_tag_name("memballoon"))
                .map(|node| attribute(node, "model")),
            cpu_mode: child(root, "cpu").map(|node| attribute(node, "mode")),
            pmu_off: at(root, &["features", "pmu"])
                .is_some_and(|node| node.attribute("state") == Some("off")),
            timers: timers.map(timer).collect(),
            has_kernel: at(root, &["os", "kernel"]).is_some()
                && at(root, &["os", "loader"]).is_none()
                && child(root, "os").is_some_and(|os| os.attribute("firmware").is_none()),
            dtb: text_of(at(root, &["os", "dtb"])),
            shmem: shmem.map(shared_memory).transpose()?,
            has_master: has_master(root),
            ..Self::default()
        };
        domain.with_tuning(tune)
    }

    /// The CPUs of a vCPU's thread, if it is pinned.
    pub fn pin(&self, vcpu: u32) -> Option<&CpuList> {
        self.pins.get(&vcpu).or(self.cpuset.as_ref())
    }

    fn with_tuning(mut self, tune: Option<Node<'_, '_>>) -> anyhow::Result<Self> {
        let parts = tune.into_iter().flat_map(|tune| tune.children());
        for node in parts.filter(Node::is_element) {
            match node.tag_name().name() {
                "vcpupin" => {
                    let vcpu = number(node, node.attribute("vcpu"), 0, MAX_VCPUS - 1)?;
                    let cpus = cpus(node, "cpuset")?.unwrap_or_default();
                    once(node, self.pins.insert(vcpu, cpus))?;
                }
                "emulatorpin" => self.emulator = cpus(node, "cpuset")?,
                "iothreadpin" => {
                    let thread = number(node, node.attribute("iothread"), 1, IOTHREADS)?;
                    once(
                        node,
                        self.iothreads
                            .insert(thread, cpus(node, "cpuset")?)
                            .flatten(),
                    )?;
                }
                "vcpusched" => {
                    let policy = match node.attribute("priority") {
                        Some(priority) => format!("{}:{priority}", attribute(node, "scheduler")),
                        None => attribute(node, "scheduler"),
                    };
                    for vcpu in cpus(node, "vcpus")?.unwrap_or_default() {
                        once(node, self.policies.insert(vcpu, policy.clone()))?;
                    }
                }
                name if name.ends_with("quota") => {
                    let limit = node.text().and_then(|text| text.trim().parse::<i64>().ok());
                    let limits = limit.is_some_and(|limit| limit > 0);
                    self.quotas.extend(limits.then(|| name.to_owned()));
                }
                _ => {}
            }
        }
        Ok(self)
    }
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn at<'a, 'input>(node: Node<'a, 'input>, path: &[&str]) -> Option<Node<'a, 'input>> {
    path.iter().try_fold(node, |node, name| child(node, name))
}

/// All elements of this name in the one at `path`.
fn all<'a, 'input>(
    node: Node<'a, 'input>,
    path: &[&str],
    name: &'a str,
) -> impl Iterator<Item = Node<'a, 'input>> {
    let within = at(node, path).into_iter();
    within
        .flat_map(|node| node.children())
        .filter(move |node| node.has_tag_name(name))
}

fn text_of(node: Option<Node<'_, '_>>) -> Option<String> {
    let text = node?.text()?.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// Empty, if it is not there.
fn attribute(node: Node<'_, '_>, name: &str) -> String {
    node.attribute(name).unwrap_or_default().to_owned()
}

/// What is wrong, with its place.
fn malformed(node: Node<'_, '_>, what: &str) -> anyhow::Error {
    let at = node.document().text_pos_at(node.range().start);
    anyhow!("line {}: <{}>: {what}", at.row, node.tag_name().name())
}

fn number(node: Node<'_, '_>, text: Option<&str>, least: u32, most: u32) -> anyhow::Result<u32> {
    let number = text.and_then(|text| text.trim().parse::<u32>().ok());
    let number = number.filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| malformed(node, &format!("needs a number from {least} to {most}")))
}

/// The list of an attribute, in libvirt's syntax: `0-3,^2` is 0, 1 and 3.
fn cpus(node: Node<'_, '_>, name: &str) -> anyhow::Result<Option<CpuList>> {
    let Some(text) = node.attribute(name) else {
        return Ok(None);
    };
    let wrong = || malformed(node, &format!("{name} is no list of CPUs, as 0-3,^2"));
    if text.len() > LIST {
        return Err(wrong());
    }
    let (mut list, mut seen) = (CpuList::default(), 0_usize);
    for part in text.split(',').map(str::trim) {
        let (part, is_out) = part
            .strip_prefix('^')
            .map_or((part, false), |part| (part, true));
        let cpus: CpuList = part.parse().map_err(|_| wrong())?;
        seen += cpus.len();
        if cpus
            .iter()
            .next_back()
            .is_some_and(|last| last >= CPUS.into())
            || seen > 2 * usize::from(CPUS)
        {
            return Err(wrong());
        }
        list = match is_out {
            true => list.without(&cpus),
            false => list.or(&cpus),
        };
    }
    match list.is_empty() {
        true => Err(wrong()),
        false => Ok(Some(list)),
    }
}

/// Fails if there was one before, as libvirt does.
fn once<T>(node: Node<'_, '_>, before: Option<T>) -> anyhow::Result<()> {
    match before {
        Some(_) => Err(malformed(node, "is there twice for one thread")),
        None => Ok(()),
    }
}

/// Of its vCPUs those that are not plugged in later.
fn at_start(root: Node<'_, '_>, vcpus: u32) -> anyhow::Result<u32> {
    let vcpu = child(root, "vcpu").filter(|node| node.has_attribute("current"));
    let current = vcpu.map(|node| number(node, node.attribute("current"), 1, vcpus));
    let off = all(root, &["vcpus"], "vcpu").filter(|node| node.attribute("enabled") == Some("no"));
    let left = vcpus.saturating_sub(u32::try_from(off.count())?);
    Ok(current.unwrap_or(Ok(vcpus))?.min(left))
}

fn iothreads(root: Node<'_, '_>) -> anyhow::Result<BTreeMap<u32, Option<CpuList>>> {
    let count =
        child(root, "iothreads").map_or(Ok(0), |node| number(node, node.text(), 0, IOTHREADS));
    let named = all(root, &["iothreadids"], "iothread");
    let named = named.map(|node| number(node, node.attribute("id"), 1, IOTHREADS));
    let named: Vec<u32> = named.collect::<anyhow::Result<_>>()?;
    // libvirt numbers those without an id by the first free ones.
    let free = (1..=IOTHREADS).filter(|id| !named.contains(id));
    let unnamed = usize::try_from(count?)?.saturating_sub(named.len());
    let all = named.iter().copied().chain(free.take(unnamed));
    Ok(all.map(|id| (id, None)).collect())
}

fn timer(node: Node<'_, '_>) -> DomainTimer {
    DomainTimer {
        name: attribute(node, "name"),
        is_off: node.attribute("present") == Some("no"),
        tickpolicy: attribute(node, "tickpolicy"),
    }
}

fn shared_memory(node: Node<'_, '_>) -> anyhow::Result<DomainShmem> {
    let msi = child(node, "msi");
    let vectors = msi.filter(|msi| msi.has_attribute("vectors"));
    let vectors = vectors.map(|msi| number(msi, msi.attribute("vectors"), 0, u16::MAX.into()));
    let server = child(node, "server").and_then(|server| server.attribute("path"));
    Ok(DomainShmem {
        is_master: node.attribute("role") == Some("master"),
        model: child(node, "model").map_or_else(String::new, |model| attribute(model, "type")),
        server: server.map(str::to_owned),
        vectors: vectors.transpose()?,
        ioeventfd: msi.is_some_and(|msi| msi.attribute("ioeventfd") == Some("on")),
    })
}

fn has_master(root: Node<'_, '_>) -> bool {
    let overrides = child(root, "override").into_iter();
    let mut properties = overrides.flat_map(|node| node.descendants());
    properties.any(|node| {
        node.attribute("name") == Some("master") && node.attribute("value") == Some("on")
    })
}
