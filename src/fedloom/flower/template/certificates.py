"""Certificates and keys, into the folder `certificates`. Nothing is overwritten; private files are for you alone.

python certificates.py server fl.example.org 192.0.2.7    # an authority, and the certificate of these names
python certificates.py node north                         # at each site: the key of its node
"""

import datetime
import ipaddress
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

FOLDER = Path("certificates")
DAYS = 825  # then run `server` in a new folder, and give everybody the new ca.crt


def server(hosts: list[str]) -> dict[str, bytes]:
    """ca.crt for everybody, server.pem and server.key for the SuperLink; the authority's own key is not kept."""
    authority, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    issuer = certificate("Fedloom authority", "Fedloom authority", authority)
    issuer = issuer.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    known_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    signed = certificate(hosts[0], "Fedloom authority", key)
    signed = signed.add_extension(x509.SubjectAlternativeName([named(host) for host in hosts]), critical=False)
    signed = signed.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    signed = signed.add_extension(known_by, critical=False)
    itself = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    issuer = issuer.add_extension(signs, critical=True).add_extension(itself, critical=False)
    return {
        "ca.crt": issuer.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM),
        "server.pem": signed.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM),
        "server.key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }


def node(name: str) -> dict[str, bytes]:
    """NAME.key stays where it is, NAME.pub goes to whoever runs the SuperLink."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return {
        f"{name}.key": key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
        f"{name}.pub": public,
    }


def certificate(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])]) for text in (subject, issuer)]
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1]).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
    return made.not_valid_after(now + datetime.timedelta(days=DAYS))


def named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write(files: dict[str, bytes]) -> None:
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    there = [name for name in files if (FOLDER / name).exists()]
    if there:
        sys.exit(f"{FOLDER / there[0]} exists already, and is not overwritten")
    for name, content in files.items():
        mode = 0o600 if name.endswith(".key") else 0o644
        with open(os.open(FOLDER / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        sys.stdout.write(f"{FOLDER / name}{' (private)' if mode == 0o600 else ''}\n")


if __name__ == "__main__":
    if len(sys.argv) >= 3 and sys.argv[1] == "server":
        write(server(sys.argv[2:]))
    elif len(sys.argv) == 3 and sys.argv[1] == "node" and sys.argv[2].replace("-", "").isalnum():
        write(node(sys.argv[2]))
    else:
        sys.exit(__doc__)
