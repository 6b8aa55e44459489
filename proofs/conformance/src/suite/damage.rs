//! Damage of the medium behind the target's back: the host gets errors for exactly the damaged blocks, and every kind
//! of verification reports them.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};

use crate::context::{TestContext, expect};
use crate::served::Server;

/// The damage to each block, and the field whose check then fails.
const HARMS: [(u64, &str, &str); 7] = [
    (3, "data", "guard"),
    (4, "guard", "guard"),
    (100, "ref-tag", "ref_tag"),
    (101, "data", "guard"),
    (777, "app-tag", "app_tag"),
    (1000, "misdirected", "ref_tag"),
    (2047, "data", "guard"),
];

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    context.sealblock.create("small", "1MiB", &["--block-size", "512", "--guard", "crc16"])?;
    context.sealblock.create("large", "8MiB", &[])?;
    let volumes = ["small", "large"];
    let mut server = context.sealblock.serve(&volumes, &[])?;
    for volume in volumes {
        context.sh(&server, &format!("conformance guest fill /dev/$(attach {volume}) 3; detach {volume}"))?;
    }
    server.stop()?;
    for volume in volumes {
        for (lba, kind, _) in HARMS {
            context.sealblock.succeed(&["corrupt", volume, "--lba", &lba.to_string(), "--kind", kind])?;
        }
    }
    server.start()?;
    for volume in volumes {
        by_the_host(context, &server, volume).with_context(|| format!("volume {volume}"))?;
        by_sealblock(context, &server, volume).with_context(|| format!("volume {volume}"))?;
    }
    repaired(context, &server)?;
    server.stop()
}

/// The kernel's reads fail for exactly the damaged blocks, and Verify sent by nvme-cli shows which check failed.
fn by_the_host(context: &mut TestContext<'_>, server: &Server, volume: &str) -> Result<()> {
    let script = format!(
        r#"
        dev=$(attach {volume})
        conformance guest scan /dev/$dev $(cat /sys/block/$dev/queue/logical_block_size)
        "#
    );
    let scanned = context.sh(server, &script)?;
    let lines: Vec<&str> = scanned.lines().collect();
    expect("blocks", &lines.last().copied(), &Some("blocks 2048"))?;
    // EILSEQ: the kernel's error for failed checks.
    let wanted = HARMS.map(|(lba, ..)| format!("{lba} 84"));
    expect(
        "blocks that the host cannot read",
        &lines[..lines.len() - 1].to_vec(),
        &wanted.each_ref().map(|line| line.as_str()).to_vec(),
    )?;
    refused(context, server, volume)?;
    let script = format!(
        r#"
        dev=$(attached {volume})
        nvme verify /dev/$dev --namespace-id=1 --start-block=5 --block-count=94
        refused "Guard Check Error" nvme verify /dev/$dev --namespace-id=1 --start-block=0 --block-count=63
        nvme error-log /dev/$dev --log-entries=1 --output-format=json >/tmp/errors
        grep -Eq '"lba" ?: ?3,' /tmp/errors || {{ cat /tmp/errors; fail "the error log does not name block 3"; }}
        nvme smart-log /dev/$dev --output-format=json | tr -d ' ' >/tmp/smart
        ! grep -q '"media_errors":0,' /tmp/smart || {{ cat /tmp/smart; fail "no media errors are counted"; }}
        "#
    );
    context.sh(server, &script)?;
    listed(context, server, volume)
}

/// Verify of each damaged block fails with the status of the check that failed.
fn refused(context: &mut TestContext<'_>, server: &Server, volume: &str) -> Result<()> {
    for (lba, _, field) in HARMS {
        let status = match field {
            "guard" => "Guard Check Error",
            "ref_tag" => "Reference Tag Check Error",
            _ => "Application Tag Check Error",
        };
        let script = format!(
            "refused '{status}' nvme verify /dev/$(attached {volume}) --namespace-id=1 --start-block={lba} --block-count=0"
        );
        context.sh(server, &script)?;
    }
    Ok(())
}

/// Get LBA Status lists exactly the damaged blocks, both by scanning the medium and from the list of known damage.
fn listed(context: &mut TestContext<'_>, server: &Server, volume: &str) -> Result<()> {
    for action in ["0x10", "0x11"] {
        let script = format!(
            "nvme get-lba-status /dev/$(attached {volume}) --namespace-id=1 --start-lba=0 --max-dw=1024 --action={action} \
             --range-len=2048"
        );
        let said = context.sh(server, &script)?;
        let hex = |text: &str| u64::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok();
        let mut blocks = Vec::new();
        for line in said.lines().filter(|line| line.contains("DSLBA")) {
            let mut fields =
                line.trim_matches(['{', '}', ' ']).split(',').map(|field| field.rsplit(':').next().and_then(hex));
            let (Some(Some(first)), Some(Some(more))) = (fields.next(), fields.next()) else {
                bail!("Get LBA Status says {line}");
            };
            blocks.extend(first..=first + more);
        }
        expect(&format!("blocks of Get LBA Status {action}"), &blocks, &HARMS.map(|(lba, ..)| lba).to_vec())?;
    }
    context.sh(server, &format!("detach {volume}")).map(drop)
}

/// `sealblock verify` over the network reports all of them, without transferring data.
fn by_sealblock(context: &mut TestContext<'_>, server: &Server, volume: &str) -> Result<()> {
    let output = context.sealblock.run(&["verify", &server.target(volume), "--mode", "offload", "--json"])?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    expect("exit status of verify", &(output.status.code(), errors.as_str()), &(Some(1), ""))?;
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).context("reading what verify said")?;
    let list = said["errors"].as_array().context("verify lists no errors")?;
    let named: BTreeMap<u64, &str> =
        list.iter().filter_map(|error| Some((error["lba"].as_u64()?, error["field"].as_str()?))).collect();
    expect("blocks that verify names", &named, &HARMS.map(|(lba, _, field)| (lba, field)).into_iter().collect())?;
    expect("bytes transferred", &said["bytes_transferred"].as_u64(), &Some(0))?;
    expect("offloaded", &said["offloaded"].as_bool(), &Some(true))
}

/// A write repairs the block that it writes, and no other.
fn repaired(context: &mut TestContext<'_>, server: &Server) -> Result<()> {
    let script = r#"
        dev=$(attach large)
        dd if=/dev/zero of=/dev/$dev bs=4096 seek=3 count=1 oflag=direct conv=notrunc status=none
        nvme verify /dev/$dev --namespace-id=1 --start-block=3 --block-count=0
        refused "Guard Check Error" nvme verify /dev/$dev --namespace-id=1 --start-block=4 --block-count=0
        detach large
        "#;
    context.sh(server, script).map(drop)
}
