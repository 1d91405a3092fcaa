"""The block types of GGML whose values come from a codebook: IQ1, IQ2 and IQ3, with blocks of 256 numbers.

An index names a point: 4 or 8 magnitudes that belong to neighbouring inputs. Signs and a scale for each group follow.
A codebook is a choice among all points of a few levels, in the order of the points' numbers, so it is stored as a bit
for each point.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from penstock.backend.lazy_torch import Tensor, torch

_BLOCK = 256
_DELTA = 0.125
"""IQ1 adds it to all numbers of a group, or subtracts it."""
_CHOSEN = zlib.decompress(
    base64.b85decode(
        b"c-nPWO^h5z6@FDzp_+EEs+VrX;#AvShfX`PjBkWXwKXFd`_dCli@Q%Ipa^m1r`_y^ac_`f3j~5oyRnmTJ92^#$c!aN$|*z~K-_Y$z=sI04@kL"
        b"yj6`@<)jd74IIWr8o_h7(``)YXy{gK?AeZAb1s04!0szwxfClphkV&2TKmw*S97i$7Zw5fXOi6J(2<$}nv04(kCty<IH0A>%_@a##KEzFwOru"
        b"GsCA+V6;T}$m$l&n%A*-%C)8;4P&XQBg`gx#Jl<Iyq>vTGq`8Wg&HXjEs!)!>2A%k@4V=&k|{94*+(g0mWN?-^XBpHlL(kI1!<=A3m#Hz3j-2"
        b"tN}YZlpR4wG!atk=c%N$oV!iS#hdg7k+dgJ;IR7Q^AkWV2ferdNt91C};=2-14AIVT%ot$P^4BeGA!I&SE5sGq5|@yO4St&kkf<}==(`LNHQm"
        b"go62pQPc0%<?>&q!QUWn_{gnAOtca3Jrr$ghXb{CQ)+7zMT7kD~OKc(ja8S5oVT8QA_s*QItXE_vthSCpKp~?c=g*;$At2uBQAA@VZ0o3<Arf"
        b"@!C}#aTCX>WnN!2PDuLP$&^?xvbSmLfY{`ZUC1`BE@T*Ecq!=(Vxnw45fr%v*CtU~4n;#q=QXwd2i|n)wIMU$o4f{X(<@DSQa2#i8VbW~Xx;H"
        b"c>J5_UE{D><$~GD0NJI1*7hGA(!@L8sk!aSpBOP)QGGjLjNmsjIqcB-cgPAQFy~a;H6g$o~$u^z!Fk>ZSE*r#^yWFHV8X22rAlE?#hbx3_c9x"
        b"<4BDdIDTe7*-LGOjZW_Q_4rg1*$mY_q;hrbBd6-^#;KQ|oD10Dv*@hoTH`}l8y6T;bKn&o+bA47i>O#{o;FgIFA6U}orMv+<ZKytThV9`v`ay"
        b"SjJ9*v7UfGkK;#=%l@Fla>9V89(Eu^y+)h%jO&lCIZwOrK4|Y04S#VU}T8IxPuPQ?DGx7{!J`zu&s7vX3yN%}%%~8(X3H#}ti;ISj@o8@xl9h"
        b"RlR)aOJsc2H-?l+9N~*GH@a`^a%}_?3V@&hE@yyFXX^>f}qn{8H5hJ4H-qY^9}}Gx3K)0gd7oSX*q6lC=Co|IYXxF2Bnp)szcgrxTYgFXykeV"
        b"_6a|j`Pge<;=p4w@WW0ESK05nOCK^ZqHNWnjL4WFtNp}U=7uYiTy|P^QDonE9Alr6Ltn1KHqDz1XAJ)k^O3zX*>CK!uTvek);R49lCI+(+Fx`"
        b"Jbgc<!5|A!U`H5h!re~*O^0me5s%pL>5*6%aL8-=*6Ctl@spiK(l=T;qdVat4-fWLR1YY|_SqqI?+w&p|P`x@WepQPi!I5B3ojaS033=&*T2("
        b"JVva@I#@#tM4;uz3Z+{S8ADDOAo56gx6=+2eqPW$o?o*XRimq+hK%a8tg^csyIQj2Qol~h1-{%_4UB6YHX%ldL##UdhzFf7$*vOU|Y1wFoaS?"
        b"!i;hA<i>evt(<5%(5lQJ<qql+C4v#<vr(hwrDw1e*vVtl{hwo6(CURAnNrpAI;N96Ruosx|?&^}Fg$yjWgu7vF=@6Eu$KE|hSts1M#t+7HzJG"
        b"CKJ9?fw1N7T56i_xG#ubBQ{)tK%vWt@`j!P1L;m>-rxH3KWvX98^*7H%+{(i}H-Od~k31-zQCdvJsURA2e|N41MnDjf02(Jh?davj;zV^7LOn"
        b"e*cpnE+2mTKVSXq{TH5YJ^p(Y$@am~-B#RP94YU7w%mFAlY(7*>C&eQ@5V{Mkj0~R3uu{mZ>c|)SKcgRXyA?F%TNjd->usAK7H#!RewZ_@BH%"
        b"ApYJ}Fr99O>jKja&WZ;=RC_%2Pvi<rpI<s4kiepeU7wKi}9+<IrO1sLfirb%hTXvOsEevglqP1=!n1g7<tJQ1w+O`1Ym5)A*w#C?JjVcu)qh9"
        b"w!n<NEzMr(Tk*5D&GFTG>91Z~q+@9k4BK^JAwda;P%)|^K5gCp@hQ7tdr#gK3O`%bG~i7)-WKK)7IQDnla7m-M`ZBMob&8@l-LaMropgihU*|"
        b"QYA^+h<}QgIXHm&V;HbEI_n&Zi2i0DXB&b<j{K&yC{80r(dth8qiN5zcqSJodD}5e%6cgCwjt#WIRL9&w7>dq{bO)KDc?uF?b)vVgdRRdZ6d+"
        b"@^pc3Lf{u!t{6Qb})}qdphAjsHxXzRj>A7M%7wPn_=!vjDJY1-kk7~7X&9!*ExLaPZ(bXdK<cer!5em+(Y}y`ZFEJGs*@jHCnD)6gZL^@XB@y"
        b"4NfHNp`d^o7kurcLNJ^Zz4g<L6WPO9oeUHojx*GrsC2Jj&-SeI0K^(+Zrb|kygweAu59d6_bpauk#zm|q=q)wfp_K>s|~a}|C=z)iD(6v+L?S"
        b"v-Nw=G?Qb0yH$8ss`Quk22@(74HzWUs2O|;j^O6@4nQyTXH3zJTXg~|?p*hTMh`-J1Jb#<N0vTl&d^$o3q~wOrMvAa&qteHTBo4qE<2)<1kgw"
        b"XE0ePZ~{B~aPgcmRJD?3{Z<=4QwOy{t5f(9PLJ*I@w4i4`~$_gTY>=`4dsi-Ex+zeZm{G1A!NY5Oc#)KhMV)#>$3UeUNqE)<BQ?3{ueT5~V@e"
        b"hvRKD)}0d1TjP+XBhzZBs!CymMedxD%N)^rp4dVkYtK9<U8W;1Kf}T*VzeVV1^>P?4I<?;`6Y_UtXZ!@C=wHcnT&S<vtFi5WE~)XV)POftm?k"
        b"+fSVvyco%-Tg!L3)tDZid(k1Cotq_jK8;1jD}htI|fH2`YST)FP(Iq1pfoYK<We"
    )
)
"""The bits of all codebooks, one after the other, lowest bit first."""


class _Codebook(NamedTuple):
    first_byte: int
    levels: tuple[int, ...]
    dimensions: int


_TWO_BITS = (8, 25, 43)
_IQ2_XXS = _Codebook(0, _TWO_BITS, 8)
_IQ2_XS = _Codebook(821, _TWO_BITS, 8)
_IQ2_S = _Codebook(1642, _TWO_BITS, 8)
_IQ1 = _Codebook(2463, (-1, 0, 1), 8)
_IQ3_XXS = _Codebook(3284, (4, 12, 20, 28, 36, 44, 52, 62), 4)
_IQ3_S = _Codebook(3796, (1, 3, 5, 7, 9, 11, 13, 15), 4)


class CodedNumbers(NamedTuple):
    """Numbers are values × factors × multipliers."""

    values: Tensor
    """int8 [blocks, 256]; float32 of IQ1."""
    factors: Tensor
    """float32 [blocks, 1], from binary16."""
    multipliers: Tensor
    """[blocks, groups, 1]: int8 if all are whole numbers, else float32."""


@cache
def _points(book: _Codebook) -> Tensor:
    """int8 [points, dimensions]"""
    base, count = len(book.levels), len(book.levels) ** book.dimensions
    stored = torch.frombuffer(bytearray(_CHOSEN[book.first_byte : book.first_byte - (-count // 8)]), dtype=torch.uint8)
    numbers = _bits(stored).flatten()[:count].nonzero()
    digits = numbers // base ** torch.arange(book.dimensions) % base
    return torch.tensor(book.levels, dtype=torch.int8)[digits]


def _bits(content: Tensor) -> Tensor:
    """Split uint8 [..., n] into [..., n, 8], lowest bit first."""
    return content[..., None] >> torch.arange(8, dtype=torch.uint8) & 1


def _words(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Read unsigned little-endian words as int64 [blocks, n]."""
    words = content.contiguous().view(dtype).long()
    return words & ((1 << 8 * dtype.itemsize) - 1)


def _parts(content: Tensor, bits: int, count: int) -> Tensor:
    """Split [blocks, n] into [blocks, n × count] parts of so many bits, lowest first."""
    shifts = torch.arange(0, bits * count, bits, dtype=content.dtype)
    return (content[:, :, None] >> shifts & ((1 << bits) - 1)).flatten(1)


def _signed(book: _Codebook, indices: Tensor, signs: Tensor) -> Tensor:
    """Values of points times their signs, int8 [blocks, 256]."""
    return (_take(_points(book), indices) * signs).view(len(indices), _BLOCK)


def _take(table: Tensor, indices: Tensor) -> Tensor:
    """Rows of 4 or 8 bytes, by int64 [blocks, n]: int8 [blocks, n × bytes]. Rows are copied as words."""
    words = table.view(torch.int32 if table.shape[1] == 4 else torch.int64).flatten()
    return words[indices.flatten(1)].view(torch.int8)


@cache
def _signs() -> Tensor:
    """int8 [256, 8]: 1, or -1 where the bit is set."""
    return 1 - 2 * _bits(torch.arange(256, dtype=torch.uint8)).to(torch.int8)


@cache
def _even_signs() -> Tensor:
    """As `_signs`, of 7 bits [128, 8]: the eighth makes the number of minus signs even."""
    signs = _signs()[:128].clone()
    signs[:, 7] = signs.prod(1, dtype=torch.int8)
    return signs


def _scale(blocks: Tensor, byte: int = 0) -> Tensor:
    return blocks[:, byte : byte + 2].contiguous().view(torch.float16).float()


def _odd(scales: Tensor, divisor: int = 1) -> Tensor:
    """Multipliers (2 × scale + 1) / divisor of groups [blocks, groups]."""
    multipliers = 2 * scales + 1
    return (multipliers.to(torch.int8) if divisor == 1 else multipliers.float() / divisor)[:, :, None]


def _iq2_xxs(blocks: Tensor) -> CodedNumbers:
    words = _words(blocks[:, 2:], torch.int32).view(-1, 8, 2)
    indices = _parts(words[:, :, 0], 8, 4)
    values = _signed(_IQ2_XXS, indices, _take(_even_signs(), _parts(words[:, :, 1], 7, 4)))
    return CodedNumbers(values, _scale(blocks), _odd(words[:, :, 1] >> 28, 8))


def _iq2_xs(blocks: Tensor) -> CodedNumbers:
    words = _words(blocks[:, 2:66], torch.int16)
    values = _signed(_IQ2_XS, words & 511, _take(_even_signs(), words >> 9))
    return CodedNumbers(values, _scale(blocks), _odd(_parts(blocks[:, 66:], 4, 2), 8))


def _iq2_s(blocks: Tensor) -> CodedNumbers:
    indices = blocks[:, 2:34].long() | _parts(blocks[:, 66:74], 2, 4).long() << 8
    values = _signed(_IQ2_S, indices, _take(_signs(), blocks[:, 34:66].long()))
    return CodedNumbers(values, _scale(blocks), _odd(_parts(blocks[:, 74:], 4, 2), 8))


def _iq3_xxs(blocks: Tensor) -> CodedNumbers:
    words = _words(blocks[:, 66:], torch.int32)
    values = _signed(_IQ3_XXS, blocks[:, 2:66].long(), _take(_even_signs(), _parts(words, 7, 4)))
    return CodedNumbers(values, _scale(blocks), _odd(words >> 28, 4))


def read_iq3_s(blocks: Tensor) -> CodedNumbers:
    """Read IQ3_S, the only one of these types that is whole numbers times a scale."""
    indices = blocks[:, 2:66].long() | _parts(blocks[:, 66:74], 1, 8).long() << 8
    values = _signed(_IQ3_S, indices, _take(_signs(), blocks[:, 74:106].long()))
    return CodedNumbers(values, _scale(blocks), _odd(_parts(blocks[:, 106:], 4, 2)))


def _iq1(low: Tensor, high: Tensor, scale: Tensor, scales: Tensor) -> CodedNumbers:
    """low: 8 bits of each index; high: its 3 upper bits, and in the fourth the sign of the delta; scales of groups."""
    delta = torch.where((high & 8).bool(), -_DELTA, _DELTA)
    points = _take(_points(_IQ1), low.long() | (high & 7) << 8).float() + delta.repeat_interleave(8, dim=1)
    return CodedNumbers(points, scale, _odd(scales))


def _iq1_s(blocks: Tensor) -> CodedNumbers:
    words = _words(blocks[:, 34:], torch.int16)
    high = _parts(words, 3, 4) | (words >> 12 & 8).repeat_interleave(4, dim=1)
    return _iq1(blocks[:, 2:34], high, _scale(blocks), words >> 12 & 7)


def _iq1_m(blocks: Tensor) -> CodedNumbers:
    """Read IQ1_M, whose scale is in the upper 4 bits of the 4 words of the groups' scales."""
    words = _words(blocks[:, 48:], torch.int16)
    scale = (words >> 12 << torch.tensor([0, 4, 8, 12])).sum(1, keepdim=True).to(torch.int16).view(torch.float16)
    return _iq1(blocks[:, :32], _parts(blocks[:, 32:48], 4, 2).long(), scale.float(), _parts(words, 3, 4))


CODEBOOK_TYPES: dict[str, tuple[int, Callable[[Tensor], CodedNumbers], tuple[int, ...]]] = {
    "IQ1_S": (50, _iq1_s, (0,)),
    "IQ1_M": (56, _iq1_m, ()),
    "IQ2_XXS": (66, _iq2_xxs, (0,)),
    "IQ2_XS": (74, _iq2_xs, (0,)),
    "IQ2_S": (82, _iq2_s, (0,)),
    "IQ3_XXS": (98, _iq3_xxs, (0,)),
}
"""Bytes of a block, its reader, which receives uint8 [blocks, bytes], and where its scale begins. IQ3_S has 110 bytes:
`read_iq3_s`."""
