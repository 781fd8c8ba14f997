"""Short, frequent words for text prompts: with a leading space, each is one token in most English
vocabularies."""

_TEXT = """
a able about above across after again air all almost alone along also always an and animal
answer any are area around art as ask at away back bad ball bank base be bed before began begin
behind best better between big bird black blood blue boat body book both box boy bring brother
brown build built but buy by call came can car care carry case cat catch cause center change
child children church city class clear close cold color come common cook cool corner country
course cover cross cry cut dark day dead deal deep did do doctor does dog done door down draw
dream drive drop dry each early earth east easy eat edge eight else end enough even evening ever
every eye face fact fall family far farm fast father feel feet fell few field fight fill find
fine fire first fish five floor fly follow food foot for form forward found four free friend
from front full game garden gave get girl give glass go god gold gone good got great green
ground group grow had hair half hand happy hard has hat have he head hear heart heat held help
her here high hill him his hold home hope horse hot hour house how hundred ice if in into iron
is island it its job join just keep kept key kind king knew know lady land large last late laugh
law lay lead learn leave left less let letter level life light like line list little live long
look lost lot love low made main make man many map mark may me mean meet men might mile milk
mind minute money month moon more morning most mother mountain mouth move much music must my
name near need never new next night nine no north not note now number of off often oil old on
once one only open or order other our out over own page paper part party pass past people person
picture piece place plan plant play point poor power press pull push put question quick quiet
rain ran reach read ready real red rest rich ride right river road rock room round rule run said
same sand saw say school sea second see seem sent set seven shape she ship shop short should
show side sign silver since sing sister sit six size sky sleep slow small snow so some son song
soon sound south space speak spring stand star start state stay step still stone stood stop
store story street strong such summer sun sure table take talk tall tell ten test than that the
their them then there these they thing think this those thought three through time to today
together told too took top town trade train travel tree trip true try turn two type under until
up us use very visit voice wait walk wall want war warm was watch water way we week well went
were west what wheel when where which while white who whole why wide wife wild will wind window
winter wish with woman wood word work world would write wrong year yes yet you young your
"""
WORDS = tuple(_TEXT.split())
