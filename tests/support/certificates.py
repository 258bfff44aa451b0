"""Certificates for tests: an authority of their own, and what it vouches for."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

__all__ = ["Authority", "Pair"]

LIFE = dt.timedelta(days=1)
#: A clock that is a little behind must not find a certificate that is not valid yet.
GRACE = dt.timedelta(hours=1)
#: What the key is for. Python 3.13 and newer, with OpenSSL 3.5, refuse an authority that tells not.
SIGNS_CERTIFICATES = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Pair:
    certificate: Path
    key: Path


class Authority:
    """Vouches for certificates."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        own = self._builder(self._name, self._key)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        own = own.add_extension(SIGNS_CERTIFICATES, critical=True)
        self.file = folder / f"{name}.crt"
        self.file.write_bytes(pem(own.sign(self._key, hashes.SHA256())))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.timezone.utc)
        issuer = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - GRACE)
            .not_valid_after(now + LIFE)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer),
                critical=False,
            )
        )

    def vouch(self, name: str, *hosts: str) -> Pair:
        """Return a certificate with its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key)
        if hosts:
            alternatives = x509.SubjectAlternativeName([general_name(host) for host in hosts])
            builder = builder.add_extension(alternatives, critical=False)
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.certificate.write_bytes(pem(builder.sign(self._key, hashes.SHA256())))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
