// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A device tree node as data, and its forms: in a blob, in a base, as source.

use std::fmt::{self, Write};

use vm_fdt::{FdtWriter, FdtWriterResult};

use crate::base::BaseNode;

/// A node with everything below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    name: String,
    target: Option<NodeTarget>,
    properties: Vec<(&'static str, PropertyValue)>,
    children: Vec<Node>,
}

/// A node that others refer to: by label in source, by phandle in a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeTarget {
    /// The name in source; unique in the tree.
    pub label: String,
    /// The number in a blob; unique in the tree.
    pub phandle: u32,
}

/// A property's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PropertyValue {
    /// Its being there is all.
    Flag,
    /// A string.
    Text(&'static str),
    /// One cell, shown in decimal.
    Number(u32),
    /// Two cells that are one number, shown in decimal.
    Wide(u64),
    /// Addresses and sizes of two cells each, shown in hexadecimal.
    Addresses(Vec<u64>),
    /// Another node.
    Reference(NodeTarget),
}

impl Node {
    pub(crate) fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            target: None,
            properties: Vec::new(),
            children: Vec::new(),
        }
    }

    pub(crate) fn named(mut self, name: String) -> Self {
        self.name = name;
        self
    }

    /// Lets others refer to this node.
    pub(crate) fn target(mut self, target: NodeTarget) -> Self {
        self.target = Some(target);
        self
    }

    pub(crate) fn with(mut self, name: &'static str, value: PropertyValue) -> Self {
        self.properties.push((name, value));
        self
    }

    /// As [`Node::with`], or nothing.
    pub(crate) fn with_some(self, name: &'static str, value: Option<PropertyValue>) -> Self {
        match value {
            Some(value) => self.with(name, value),
            None => self,
        }
    }

    pub(crate) fn children(mut self, children: impl IntoIterator<Item = Node>) -> Self {
        self.children.extend(children);
        self
    }

    /// Writes the node where the writer is.
    pub(crate) fn write(&self, fdt: &mut FdtWriter) -> FdtWriterResult<()> {
        let open = fdt.begin_node(&self.name)?;
        for (name, value) in &self.properties {
            fdt.property(name, &value.bytes())?;
        }
        if let Some(target) = &self.target {
            // The writer finds one that is there twice.
            fdt.property_phandle(target.phandle)?;
        }
        for child in &self.children {
            child.write(fdt)?;
        }
        fdt.end_node(open)
    }

    /// The node as one of a base.
    pub(crate) fn into_base<'a>(self) -> BaseNode<'a> {
        let properties = self.properties.into_iter();
        let properties = properties.map(|(name, value)| (name, value.bytes()));
        let phandle = self.target.map(|target| target.phandle.to_be_bytes());
        let phandle = phandle.map(|phandle| ("phandle", phandle.to_vec()));
        let children = self.children.into_iter().map(Self::into_base);
        BaseNode {
            name: self.name.into(),
            properties: properties
                .chain(phandle)
                .map(|(name, value)| (name, value.into()))
                .collect(),
            children: children.collect(),
        }
    }

    /// Prints the node as source, `depth` tabs in.
    fn print(&self, out: &mut impl Write, depth: usize) -> fmt::Result {
        let tabs = "\t".repeat(depth);
        let name = if self.name.is_empty() {
            "/"
        } else {
            &self.name
        };
        match &self.target {
            Some(target) => writeln!(out, "{tabs}{}: {name} {{", target.label)?,
            None => writeln!(out, "{tabs}{name} {{")?,
        }
        for (name, value) in &self.properties {
            writeln!(out, "{tabs}\t{name}{value};")?;
        }
        for (index, child) in self.children.iter().enumerate() {
            if index != 0 || !self.properties.is_empty() {
                writeln!(out)?;
            }
            child.print(out, depth + 1)?;
        }
        writeln!(out, "{tabs}}};")
    }
}

/// The source form. Phandles are left to the compiler: they would clash where
/// the text is included into another tree.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.print(f, 0)
    }
}

impl PropertyValue {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Flag => Vec::new(),
            Self::Text(text) => [text.as_bytes(), &[0]].concat(),
            Self::Number(number) => number.to_be_bytes().into(),
            Self::Wide(number) => number.to_be_bytes().into(),
            Self::Addresses(values) => values
                .iter()
                .flat_map(|value| value.to_be_bytes())
                .collect(),
            Self::Reference(target) => target.phandle.to_be_bytes().into(),
        }
    }
}

/// Everything after the property's name: ` = <5>`, or nothing for a flag.
impl fmt::Display for PropertyValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => Ok(()),
            // Only fixed strings get here, none of them with a quote.
            Self::Text(text) => write!(f, " = \"{text}\""),
            Self::Number(number) => write!(f, " = <{number}>"),
            Self::Wide(number) => write!(f, " = /bits/ 64 <{number}>"),
            Self::Addresses(values) => {
                let cells: Vec<String> = values
                    .iter()
                    .map(|value| format!("{:#x} {:#x}", value >> 32, value & 0xffff_ffff))
                    .collect();
                write!(f, " = <{}>", cells.join(" "))
            }
            Self::Reference(target) => write!(f, " = <&{}>", target.label),
        }
    }
}
