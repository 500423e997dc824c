// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What of a value a JSON schema doesn't allow, by the keywords that vmm/report.schema.json
//! has.

use serde_json::Value;

/// The first thing that isn't as the schema has it, with its place; `None` if all is.
pub fn fault(schema: &Value, value: &Value) -> Option<String> {
    if let Some(choices) = schema["anyOf"].as_array() {
        let faults: Option<Vec<_>> = choices.iter().map(|one| fault(one, value)).collect();
        return faults.map(|all| all.join(", and "));
    }
    if let Some(allowed) = schema["enum"].as_array() {
        return (!allowed.contains(value)).then(|| format!(" is none of {allowed:?}"));
    }
    let types = &schema["type"];
    let is = |one: &Value| one.as_str().is_some_and(|name| is_of(name, value));
    if !types.is_null() && !is(types) && !types.as_array().is_some_and(|all| all.iter().any(is)) {
        return Some(format!(" is no {types}"));
    }
    let items = value.as_array().into_iter().flatten().enumerate();
    let mut items = items
        .filter_map(|(at, item)| Some(format!("[{at}]{}", fault(schema.get("items")?, item)?)));
    items.next().or_else(|| fault_of_object(schema, value))
}

fn fault_of_object(schema: &Value, value: &Value) -> Option<String> {
    let entries = value.as_object()?;
    let required = schema["required"].as_array().into_iter().flatten();
    let mut names = required.filter_map(Value::as_str);
    if let Some(name) = names.find(|name| !entries.contains_key(*name)) {
        return Some(format!(" lacks {name}"));
    }
    entries.iter().find_map(|(name, value)| {
        let own = schema["properties"].get(name);
        match own.or(schema.get("additionalProperties"))? {
            Value::Bool(false) => Some(format!(" has {name}")),
            own => Some(format!(".{name}{}", fault(own, value)?)),
        }
    })
}

fn is_of(name: &str, value: &Value) -> bool {
    match name {
        "array" => value.is_array(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "null" => value.is_null(),
        "object" => value.is_object(),
        "string" => value.is_string(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    //! Promise: what a schema doesn't allow is found, with its place.
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_not_allowed_is_named() {
        let cpu = json!({
            "type": "object", "required": ["cpu"], "additionalProperties": false,
            "properties": { "cpu": { "type": "integer" }, "midr": { "type": ["string", "null"] } },
        });
        let none = json!({ "enum": ["none"] });
        let schema = json!({ "type": "array", "items": { "anyOf": [none, cpu] } });
        for (value, wanted) in [
            (json!([{ "cpu": 1, "midr": null }, "none"]), ""),
            (json!({}), " is no \"array\""),
            (json!([{ "midr": "a" }]), " lacks cpu"),
            (json!(["none", 1]), "[1]"),
            (json!([{ "cpu": "a" }]), ".cpu is no \"integer\""),
            (json!([{ "cpu": 1, "serial": 7 }]), " has serial"),
        ] {
            let found = fault(&schema, &value);
            assert_eq!(found.is_some(), !wanted.is_empty());
            assert!(found.unwrap_or_default().contains(wanted), "{value}");
        }
    }
}
