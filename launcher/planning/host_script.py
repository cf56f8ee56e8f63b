"""The probe of a host, in plain sh: one round trip, and no Python there. What it says is read by `host_facts.py`.

It changes nothing. A tool that is absent, broken or slow is a fact, too: none is waited for longer than 8 s, since
even nvidia-smi may take some where nothing keeps the driver loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

PROBE_LIMIT_S = 20.0
"""How long the probe may take. What it asks is limited to less than half of that, one thing beside the other."""

GIB_SCRIPT = "/usr/local/gib/scripts/set_nccl_env.sh"
TCPXO_SCRIPTS = ("/var/lib/tcpxo/lib64/nccl-env-profile.sh", "/usr/local/nvidia/lib64/nccl-env-profile.sh")
"""The first is where virtual machines have it, the second where GKE has."""
NCCL_CONF = "/etc/nccl.conf"
PATHS = (
    "/dev/infiniband",
    NCCL_CONF,
    GIB_SCRIPT,
    *TCPXO_SCRIPTS,
    "/dev/aperture_devices",
    "/run/tcpx",
    "/var/lib/tcpx/lib64",
    "/var/lib/nvidia/lib64",
    "/opt/microsoft",
    "/opt/amazon/efa",
)
"""What providers bring, and devices: whether it is there."""

GPU_BASE = ("index", "name", "memory.total", "driver_version")
GPU_HEALTH = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.active",
    "power.limit",
    "power.default_limit",
    "temperature.gpu",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
)

_SCRIPT = r"""
root=$1; shift
export LC_ALL=C
say() { printf 'launch-host %s\n' "$*"; }
limit() { limit=$1; shift; if command -v timeout >/dev/null 2>&1; then timeout "$limit" "$@"; else "$@"; fi; }
limited() { limit 4 "$@"; }
first() { IFS= read -r line && printf %s "$line"; }
last() { kept=; while IFS= read -r line; do [ -z "$line" ] || kept=$line; done; printf %s "$kept"; }
say begin 1
host=$(uname -n)
say hostname "$host"
say reached-at "$SSH_CONNECTION"
say clock "$(date +%s.%N 2>/dev/null)"
(
if command -v nvidia-smi >/dev/null 2>&1; then
    out=$(limit 8 nvidia-smi --query-gpu=@BASE@ --format=csv,noheader,nounits 2>&1); code=$?
    if [ $code = 0 ]; then
        printf '%s\n' "$out" | while IFS= read -r line; do say gpu "$line"; done
        {
            health=$(limited nvidia-smi --query-gpu=@HEALTH@ --format=csv,noheader,nounits 2>/dev/null) &&
                printf '%s\n' "$health" | while IFS= read -r line; do say health "$line"; done
        } &
        limited nvidia-smi 2>/dev/null | while IFS= read -r line; do
            case $line in *"CUDA Version: "*) line=${line##*CUDA Version: }; say cuda "${line%%[!0-9.]*}";; esac
        done &
        limited nvidia-smi topo -m 2>/dev/null | while IFS= read -r line; do say topo "$line"; done &
        wait
    elif [ $code = 124 ]; then say gpu-fault "nvidia-smi does not answer"
    else say gpu-fault "nvidia-smi: $(printf '%s\n' "$out" | first)"
    fi
elif [ -e "$root/proc/driver/nvidia/version" ]; then say gpu-fault "there is a driver, and no nvidia-smi"
fi
) &
(
if command -v docker >/dev/null 2>&1; then
    format='{{.ServerVersion}} {{range $name, $value := .Runtimes}}{{$name}},{{end}}'
    out=$(limited docker info --format "$format" 2>/dev/null); code=$?
    [ $code = 0 ] || [ $code = 124 ] || out=$(limited docker version --format '{{.Server.Version}}' 2>&1 | last)
    say docker "$code" "$out"
fi
) &
(
if command -v podman >/dev/null 2>&1; then
    out=$(limited podman version --format '{{.Client.Version}}' 2>/dev/null | first); say podman "$out"
fi
) &
(
if command -v quota >/dev/null 2>&1; then
    limited quota -w 2>/dev/null | while IFS= read -r line; do say quota "$line"; done
fi
) &
(
if command -v sinfo >/dev/null 2>&1; then
    out=$(limited sinfo --version 2>&1); code=$?; say slurm "$(printf '%s\n' "$out" | first)"
    [ $code = 124 ] || { out=$(limited sinfo --noheader --format '%D %t' 2>&1); code=$?; }
    [ $code = 124 ] && out='it does not answer'
    say sinfo "$code" "$(printf '%s\n' "$out" | first)"
fi
) &
if command -v ip >/dev/null 2>&1; then
    ip -o addr show up 2>/dev/null | while read -r _ name family address _; do
        case $family in inet|inet6) say address "${name%%@*}" "${address%%/*}";; esac
    done
    # /sys may show another network than the one that this process is in.
    ip -o link show up 2>/dev/null | while read -r _ name _ _ mtu _; do
        name=${name%:}; say link "${name%%@*}" "$mtu"
    done
else say no-ip
fi
for folder in "$root"/sys/class/net/*; do
    [ -e "$folder/mtu" ] || continue
    speed=$(cat "$folder/speed" 2>/dev/null); state=$(cat "$folder/operstate" 2>/dev/null); kind=cable
    [ -e "$folder/device" ] || kind=virtual
    say interface "${folder##*/}" "$(cat "$folder/mtu" 2>/dev/null)" "${speed:--1}" "${state:-unknown}" "$kind"
done
for device in "$root"/sys/class/infiniband/*; do
    [ -d "$device" ] || continue
    driver=$(readlink "$device/device/driver"); driver=${driver##*/}
    for port in "$device"/ports/*; do
        [ -d "$port" ] || continue
        state=$(cat "$port/state" 2>/dev/null); rate=$(cat "$port/rate" 2>/dev/null)
        state=${state##*: }; layer=$(cat "$port/link_layer" 2>/dev/null); rate=${rate%% *}
        say port "${device##*/}" "${port##*/}" "${state:-unknown}" "${layer:-unknown}" "${rate:--}" "${driver:-unknown}"
    done
done
for path in @PATHS@; do [ -e "$root$path" ] && say path "$path"; done
if [ -r "$root/etc/nccl.conf" ]; then
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in '#'*|'') ;; *) say nccl-conf "$line";; esac
    done <"$root/etc/nccl.conf"
fi
if [ -r "$root/etc/hosts" ]; then
    while read -r address names; do
        case $address in 127.*|::1) case " $names " in *" $host "*) say own-name "$address";; esac;; esac
    done <"$root/etc/hosts"
fi
for file in sys_vendor chassis_asset_tag product_name; do
    [ -r "$root/sys/class/dmi/id/$file" ] && say vendor "$(cat "$root/sys/class/dmi/id/$file" 2>/dev/null)"
done
say memlock "$(ulimit -l 2>/dev/null)"
say nofile "$(ulimit -n 2>/dev/null)"
say cpus "$(nproc 2>/dev/null)"
if [ -r "$root/proc/meminfo" ]; then
    while read -r name value _; do
        case $name in MemTotal:|MemAvailable:) say memory "${name%:}" "$value";; esac
    done <"$root/proc/meminfo"
fi
for folder in /dev/shm "$@"; do
    at=$folder
    while [ -n "$at" ] && [ ! -e "$at" ]; do at=${at%/*}; done
    writable=no; [ -w "${at:-/}" ] && writable=yes
    df -Pk "${at:-/}" 2>/dev/null | {
        read -r _; read -r _ total _ free _; say space "$total" "$free" "$writable" "$folder"
    }
done
wait
say end
"""


def probe_argv(folders: Sequence[str] = (), *, root: str = "") -> tuple[str, ...]:
    """The command whose output `host_facts` reads. folders: where space is looked up; root: what stands for /."""
    script = _SCRIPT.replace("@BASE@", ",".join(GPU_BASE)).replace("@HEALTH@", ",".join(GPU_HEALTH))
    return ("sh", "-c", script.replace("@PATHS@", " ".join(PATHS)), "launch-probe", root, *folders)
