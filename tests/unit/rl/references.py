"""Reference answers as in MATH, DeepScaleR and GSM8K, 40 of each of five forms; " | " precedes an equal answer."""

MATRICES_AND_VECTORS = r"""
\begin{pmatrix} -2 \\ -14 \end{pmatrix}
\begin{pmatrix} -2 & 5 \\ 3 & -14 \end{pmatrix}
\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}
\begin{pmatrix} 1/2 \\ 3/4 \end{pmatrix}
\begin{pmatrix} \frac{1}{2} \\ \frac{3}{4} \end{pmatrix} | \begin{pmatrix} 0.5 \\ 0.75 \end{pmatrix}
\begin{pmatrix} a & b \\ c & d \end{pmatrix}
\begin{pmatrix} x \\ y \\ z \end{pmatrix}
\begin{pmatrix} 2x \\ 3y \end{pmatrix}
\begin{pmatrix} xy \\ x^2 \end{pmatrix}
\begin{pmatrix} 0 & 1 & 2 \\ 3 & 4 & 5 \\ 6 & 7 & 8 \end{pmatrix}
\begin{pmatrix} \sqrt{2} \\ -\sqrt{2} \end{pmatrix}
\begin{pmatrix} \cos x \\ \sin x \end{pmatrix}
\begin{pmatrix} 1 & 2 & 3 \end{pmatrix}
\begin{pmatrix} 5 \end{pmatrix}
\begin{pmatrix} -1 & -2 \\ -3 & -4 \end{pmatrix} | -\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix} 10 & 20 \\ 30 & 40 \end{pmatrix} | 10\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix} 16/49 \\ 48/49 \\ 24/49 \end{pmatrix}
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}
\begin{pmatrix} 0 & -1 \\ 1 & 0 \end{pmatrix}
\begin{pmatrix} 7 & 0 \\ 0 & 7 \end{pmatrix} | 7\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}
\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
\begin{bmatrix} 1 \\ 2 \end{bmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
\begin{bmatrix} 3 & -1 \\ 4 & 11 \end{bmatrix}
\begin{bmatrix} 0.5 & 0.25 \\ 0.5 & 0.75 \end{bmatrix} | \begin{bmatrix} 1/2 & 1/4 \\ 1/2 & 3/4 \end{bmatrix}
\begin{bmatrix} t \\ 1-t \end{bmatrix}
\begin{bmatrix} n & m \\ m & n \end{bmatrix}
\begin{bmatrix} 100 \\ -100 \end{bmatrix}
\begin{bmatrix} 2 & 4 & 6 \\ 1 & 3 & 5 \end{bmatrix}
\begin{bmatrix} 1 & 1 \\ 0 & 1 \end{bmatrix}
\begin{bmatrix} \pi \\ 2\pi \end{bmatrix}
\left( \begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array} \right)
\begin{matrix} 1 & 2 \\ 3 & 4 \end{matrix}
\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix} | -2
\left(1, 2, 3\right) | (1,2,3)
(-1, 0, 4)
(0, -\frac{1}{2}, 3) | (0, -0.5, 3)
(a, b, c)
(2\sqrt{3}, \frac{\pi}{6})
(6, 31, -1)
\left( 3, \frac{\pi}{2} \right)
"""
INTERVALS_AND_SETS = r"""
(1,2)
[1,2)
(1,2] | \left(1, 2\right]
[0,1]
(-\infty, 3]
(-\infty,\infty)
[2,\infty)
(-\infty, -2) \cup (2, \infty)
(0,9)\cup(9,36)
[-1,0)\cup(0,1]
(-\infty,0)\cup(0,\infty)
\left[-\frac{1}{2}, \frac{1}{2}\right] | [-0.5, 0.5]
[-\sqrt{2}, \sqrt{2}]
(0, \pi)
[0, 2\pi)
(-3, -2) \cup (-1, 0) \cup (1, 2)
\left(\frac{3}{2}, 4\right)
[5, 5.5] | [5, 11/2]
(2, 4)\cup\{7\}
(-1, 1]\cup[3, 8)
\{1,2\} | \{2,1\}
\{1,2,3\} | \{3, 2, 1\}
\{-1, 0, 1\}
\{x, y\}
\left\{\frac{1}{2}, 2\right\} | \{0.5, 2\}
\{0\}
\emptyset
\{\sqrt{2}, -\sqrt{2}\} | \{-\sqrt{2}, \sqrt{2}\}
\{a, b, c\}
\{10, 20, 30, 40\}
1,2 | 2,1
1, 2, 3 | 3, 1, 2
-1, 1
\frac{1}{2}, \frac{1}{3} | \frac{1}{3}, \frac{1}{2}
2, 3, 5, 7, 11
10\text{ and }20 | 10,20
3 \text{ or } 4 | 3,4
12 and 15 | 12, 15
\pm 3 | 3,-3
2 \pm \sqrt{5} | 2+\sqrt{5}, 2-\sqrt{5}
"""
EXPRESSIONS = r"""
xy | yx
3xy | 3yx
2ab+5 | 2ba+5
a^2+ab+b^2 | b^2+ab+a^2
\frac{ab}{c} | \frac{a}{c}b
x^2+ab
abc
2\sin x
\sin^2 x
\cos(2x)
\tan x
\ln 2
\log_2 3
e^{2x}
e^x+xe^x | (1+x)e^x
x^2+2x+1 | (x+1)^2
(x+1)(x-1) | x^2-1
x(x+1)(x+2)
\frac{x+1}{x-1}
\frac{n(n+1)}{2} | \frac{n^2+n}{2}
\frac{1}{x}+\frac{1}{y} | \frac{x+y}{xy}
\sqrt{x^2+y^2}
\sqrt{ab}
\sqrt[3]{2}
2\sqrt{3}
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt{2}}
3+2\sqrt{2} | (1+\sqrt{2})^2
\frac{1+\sqrt{5}}{2}
\pi r^2
2\pi rh
\frac{4}{3}\pi r^3
4\pi
n!
\binom{n}{2}
mgh
\frac{mv^2}{2} | \frac{1}{2}mv^2
|x-y|
1+2i | 2i+1
-x^3+3xy^2
2^{n+1}-1 | 2\cdot 2^n-1
"""
EQUATIONS_AND_SEVERAL_ANSWERS = r"""
y = mx+b
y=2x+3 | 2x+3=y
x=2
x = 2 | 2
x = -\frac{3}{4} | -0.75
x=2 \text{ and } y=3 | x=2, y=3
x=2, y=3
a=1, b=2, c=3
x=1 \text{ or } x=-1 | x=1, x=-1
x = 0, 5
x^2+y^2=25
(x-1)^2+(y+2)^2=9
x^2+xy+y^2=7
ax+by=c
3x-4y+12=0
y=x^2-4x+3
y-1=2(x-3) | y = 2x-5
\frac{x^2}{4}+\frac{y^2}{9}=1
f(x)=x^2+1
f(x) = 2x
A=\pi r^2
V = lwh
xy=1
ab=ba+1
x>3
x \ge 5
x\le -2
-2<x<3
-1 \le x < 4
x \ne 0
0<ab<1
n=2k
n = 12 | 12
x+y+z=0
2x+y-3z=5
t = \frac{\pi}{4} | \frac{\pi}{4}
r = 2\cos\theta
p=7, q=11
x_1=1, x_2=2
k=3 | 3
"""
NUMBERS_UNITS_WORDS = r"""
0
-7
42 | 42.0
1,000 | 1000
12{,}345 | 12345
3.14
0.001
.5 | 0.5
1/2 | 0.5
-3/4 | -0.75
\frac{1}{2} | 1/2
\frac12 | 0.5
\dfrac{3}{7} | \frac{3}{7}
-\frac{11}{13}
3\frac{1}{2} | 3.5
\$5 | 5
\$18.90 | 18.9
50\% | 50
12.5\%
30^\circ | 30
45^{\circ}
5\text{ cm} | 5
10 \text{ meters} | 10
12 \text{ cm}^2 | 12
3 apples | 3
8 hours | 8
7\text{ days}
2^{10} | 1024
10^{-3} | 0.001
6!
\text{(A)} | (A)
\text{Monday} | Monday
\text{no solution} | no solution
\text{even}
\text{Alice and Bob}
Monday
north
undefined
2:3
1.5 \times 10^3 | 1500
"""
FORMS = {
    "matrices and vectors": MATRICES_AND_VECTORS,
    "intervals and sets": INTERVALS_AND_SETS,
    "expressions": EXPRESSIONS,
    "equations and several answers": EQUATIONS_AND_SEVERAL_ANSWERS,
    "numbers, units and words": NUMBERS_UNITS_WORDS,
}
