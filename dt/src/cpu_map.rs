// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A base's cpu-map, as Linux reads it (`parse_dt_topology`).

use std::collections::HashMap;

use crate::base::BaseNode;
use crate::phandles::Phandles;

/// The cluster of each CPU, as its path below the map; `None` if Linux finds an error or misses a
/// CPU: it then takes no topology and no capacities.
///
/// `cpus` are the CPUs' phandles.
pub fn clusters(map: &BaseNode<'_>, cpus: &[Option<u32>], used: &Phandles) -> Option<Vec<String>> {
    let numbered = cpus.iter().zip(0..);
    let numbered = numbered.filter_map(|(phandle, cpu)| phandle.map(|phandle| (phandle, cpu)));
    let mut walk = MapWalk {
        cpus: numbered.collect(),
        used,
        clusters: vec![None; cpus.len()],
    };
    walk.map(map)?;
    walk.clusters.into_iter().collect()
}

struct MapWalk<'p> {
    cpus: HashMap<u32, usize>,
    used: &'p Phandles,
    clusters: Vec<Option<String>>,
}

impl MapWalk<'_> {
    fn map(&mut self, map: &BaseNode<'_>) -> Option<()> {
        let sockets = numbered(map, "socket");
        if sockets.is_empty() {
            return self.cluster(map, "", false);
        }
        let mut sockets = sockets.into_iter().zip(0..);
        sockets.try_for_each(|(socket, n)| self.cluster(socket, &format!("socket{n}"), false))
    }

    /// A cluster; or what is above clusters and has no cores.
    fn cluster(&mut self, node: &BaseNode<'_>, path: &str, is_cluster: bool) -> Option<()> {
        let clusters = numbered(node, "cluster");
        let cores = numbered(node, "core");
        if !(cores.is_empty() || is_cluster && clusters.is_empty()) {
            return None;
        }
        let mut clusters = clusters.into_iter().zip(0..);
        clusters.try_for_each(|(cluster, n)| {
            let path = match path {
                "" => format!("cluster{n}"),
                path => format!("{path}/cluster{n}"),
            };
            self.cluster(cluster, &path, true)
        })?;
        cores.into_iter().try_for_each(|core| self.core(core, path))
    }

    fn core(&mut self, core: &BaseNode<'_>, cluster: &str) -> Option<()> {
        let threads = numbered(core, "thread");
        let own = self.cpu(core, cluster);
        match (threads.is_empty(), own) {
            (false, Some(true)) | (true, None) => return None,
            _ => {}
        }
        let mut threads = threads.into_iter();
        threads.try_for_each(|thread| self.cpu(thread, cluster).map(|_| ()))
    }

    /// Whether the node refers to a CPU, which then is in this cluster; `None` if it refers to no
    /// node.
    fn cpu(&mut self, node: &BaseNode<'_>, cluster: &str) -> Option<bool> {
        let phandle = node.property("cpu")?.first_chunk()?;
        let phandle = u32::from_be_bytes(*phandle);
        if let Some(&cpu) = self.cpus.get(&phandle) {
            self.clusters[cpu] = Some(cluster.to_owned());
            return Some(true);
        }
        self.used.has(phandle).then_some(false)
    }
}

/// The children of this name with the numbers from 0 on, up to the first gap.
fn numbered<'b, 'a>(node: &'b BaseNode<'a>, name: &str) -> Vec<&'b BaseNode<'a>> {
    let mut children = HashMap::new();
    for child in &node.children {
        children.entry(child.base_name()).or_insert(child);
    }
    let numbers = 0_usize..;
    let found = numbers.map_while(|n| children.remove(format!("{name}{n}").as_str()));
    found.collect()
}
