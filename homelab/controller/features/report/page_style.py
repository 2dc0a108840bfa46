"""The style and the script of a report's page, as text. Colours: the set of Okabe and Ito (2008), which colour-blind people tell apart, Pure.
darkened where a white page needs contrast; every line has dashes of its own, too."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1b1d21;--dim:#5a606b;--edge:#dcdfe4;--soft:#eef0f3;
--c0:#0072b2;--c1:#c04f00;--c2:#007a59;--c3:#a8497f;--c4:#50545c;--c5:#7a6000;--ok:#007a59;--bad:#b3261e;--run:#0072b2;--idle:#6b7280;--mark:#c04f00}
@media (prefers-color-scheme:dark){:root{--bg:#121417;--card:#1a1d21;--ink:#e7e9ec;--dim:#a2a9b4;--edge:#33383f;--soft:#23272d;
--c0:#56b4e9;--c1:#f0a03c;--c2:#3fcfa4;--c3:#e08fbf;--c4:#c3c8d0;--c5:#f0e442;--ok:#2a8f70;--bad:#cf4a41;--run:#2f7fb3;--idle:#6b7280;--mark:#f0a03c}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main,header,footer{max-width:1180px;margin:0 auto;padding:0 20px}
header{padding-top:28px}h1{font-size:1.5rem;line-height:1.25;margin:0 0 6px;overflow-wrap:anywhere}
h2{font-size:1.12rem;margin:36px 0 10px}p{margin:6px 0}.dim,.unit,.note,footer{color:var(--dim)}.note{font-size:.88rem}
.state{display:inline-block;padding:1px 11px;border-radius:99px;color:#fff;font-size:.88rem;font-weight:600;background:var(--idle)}
.state.done{background:var(--ok)}.state.failed,.state.lost{background:var(--bad)}.state.running,.state.starting{background:var(--run)}
nav{margin:12px 0 0;font-size:.92rem}nav a{color:var(--c0);margin-right:14px;white-space:nowrap;display:inline-block;padding:3px 0}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(145px,1fr));gap:10px;margin:18px 0 0;padding:0}
.figures div{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:10px 13px}
.figures dt{color:var(--dim);font-size:.82rem}.figures dd{margin:0;font-size:1.15rem;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.answer{font-size:1.12rem;font-weight:600}.figures small{display:block;font-size:.78rem;font-weight:400;color:var(--dim)}
.missing{border-left:4px solid var(--mark);background:var(--card);padding:8px 14px;margin:18px 0 0;border-radius:0 8px 8px 0}.missing ul{margin:4px 0;padding-left:20px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px}
.chart{margin:0;background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:12px 14px;min-width:0}
.chart>svg{display:block;width:100%;height:auto;touch-action:pan-y}figcaption{font-weight:600;margin-bottom:6px}figcaption .unit{font-weight:400;font-size:.88rem}
.tick,.name,.inbar{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--dim)}.inbar{fill:#fff}
.grid{stroke:var(--edge);stroke-width:1}.axis{stroke:var(--dim);stroke-width:1}.cursor{stroke:var(--dim);stroke-width:1;stroke-dasharray:2 3}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke:var(--c0)}.dot{fill:var(--c0)}
.line.s1{stroke:var(--c1);stroke-dasharray:7 3}.line.s2{stroke:var(--c2);stroke-dasharray:2 3}.line.s3{stroke:var(--c3);stroke-dasharray:10 3 2 3}
.line.s4{stroke:var(--c4);stroke-dasharray:4 4}.line.s5{stroke:var(--c5);stroke-dasharray:12 4}
.dot.s1{fill:var(--c1)}.dot.s2{fill:var(--c2)}.dot.s3{fill:var(--c3)}.dot.s4{fill:var(--c4)}.dot.s5{fill:var(--c5)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:6px 0 0;padding:0;font-size:.86rem}.legend li{display:flex;align-items:center;gap:6px}
.key{width:26px;height:12px;flex:none}.value{min-height:1.4em;margin:2px 0 0;font-size:.84rem;color:var(--dim);font-variant-numeric:tabular-nums}
.bar{fill:var(--idle)}.b-done{fill:var(--ok)}.b-failed,.b-lost{fill:var(--bad)}.b-running{fill:var(--run)}
.m-fault{fill:var(--bad)}.m-rebalance{fill:var(--c0);stroke:var(--card)}
.scroll{overflow-x:auto;border:1px solid var(--edge);border-radius:10px;background:var(--card)}.tall{max-height:430px;overflow-y:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}th,td{padding:6px 12px;text-align:left;vertical-align:top}
thead th{background:var(--soft);font-weight:600;position:sticky;top:0;vertical-align:bottom}tbody tr+tr>*{border-top:1px solid var(--edge)}
tbody th{font-weight:600}.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}.t{white-space:nowrap;font-variant-numeric:tabular-nums}
td,th{overflow-wrap:break-word}.text{white-space:pre-wrap;overflow-wrap:anywhere;min-width:15rem}caption{text-align:left;padding:8px 12px;color:var(--dim);font-size:.86rem}
.share{height:9px;min-width:110px;width:100%;display:block}.share .p{fill:var(--c4)}.share .d{fill:var(--c0)}
details{margin:10px 0}summary{cursor:pointer;padding:6px 0}footer{padding-top:26px;padding-bottom:36px;font-size:.86rem}
.sort-fault{color:var(--bad);font-weight:600}.sort-rebalance{color:var(--c0);font-weight:600}
@media (prefers-color-scheme:dark){.sort-fault{color:#ff8a80}.m-fault{fill:#ff8a80}}
@media (max-width:640px){main,header,footer{padding-left:14px;padding-right:14px}.tick,.name,.inbar{font-size:17px}.chart{padding:10px}
.figures{grid-template-columns:1fr 1fr}th,td{padding:6px 9px}.t{white-space:normal}.text{min-width:0}.tall td,.tall th{padding:5px 3px;font-size:.75rem;white-space:normal}}
@media (max-width:900px){
.blocks thead{display:none}.blocks table,.blocks tbody,.blocks tr,.blocks caption{display:block}.blocks tr{padding:6px 0}
.blocks td,.blocks th{display:flex;justify-content:space-between;gap:14px;padding:3px 10px;text-align:right;white-space:normal}.blocks tbody tr+tr>*{border-top:0}
.blocks tbody tr+tr{border-top:1px solid var(--edge)}.blocks td:empty{display:none}.blocks .share{max-width:50%}
.blocks td:before,.blocks th:before{content:attr(data-head);color:var(--dim);font-weight:400;text-align:left;flex:none;max-width:50%}
.blocks td.text{display:block;text-align:left}.blocks td.text:before{display:block}}
.wide svg:not(.key){max-width:760px}
@media print{.chart,.scroll{break-inside:avoid}.tall{max-height:none}nav{display:none}}
"""

SCRIPT = """
(function(){"use strict";
var charts=JSON.parse(document.getElementById("points").textContent);
function nearest(points,step){var low=0,high=points.length-1;
 while(high-low>1){var middle=(low+high)>>1;if(points[middle][0]<step)low=middle;else high=middle;}
 return Math.abs(points[low][0]-step)<=Math.abs(points[high][0]-step)?points[low]:points[high];}
function number(value){var size=Math.abs(value);
 return value===0?"0":size>=1e4?Math.round(value).toLocaleString("en"):size<1e-3?value.toExponential(2):String(+value.toPrecision(4));}
document.querySelectorAll("svg[data-chart]").forEach(function(svg){
 var chart=charts[svg.dataset.chart],box=svg.viewBox.baseVal,cursor=svg.querySelector(".cursor");
 var value=document.querySelector('[data-value="'+svg.dataset.chart+'"]');
 function show(event){var area=svg.getBoundingClientRect(),x=(event.clientX-area.left)/area.width*box.width;
  var step=chart.from+(x-chart.left)/(chart.right-chart.left)*(chart.to-chart.from);
  var at=chart.series.map(function(one){return nearest(one.points,step);});
  var place=chart.left+(at[0][0]-chart.from)/((chart.to-chart.from)||1)*(chart.right-chart.left);
  cursor.setAttribute("x1",place);cursor.setAttribute("x2",place);cursor.setAttribute("y1",12);cursor.setAttribute("y2",box.height-40);
  value.textContent=chart.series.map(function(one,i){return one.label+" in step "+at[i][0]+": "+number(at[i][1]);}).join(" \\u00b7 ");}
 svg.addEventListener("pointermove",show);svg.addEventListener("pointerdown",show);
 svg.addEventListener("pointerleave",function(){cursor.setAttribute("x1",-9);cursor.setAttribute("x2",-9);value.textContent="";});
});})();
"""
