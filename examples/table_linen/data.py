"""Write wine.csv: 178 wines, 13 measurements of each, and the cultivar."""

from sklearn.datasets import load_wine

if __name__ == "__main__":
    table = load_wine(as_frame=True).frame
    table["grower"] = table.pop("target").map({0: "Barolo", 1: "Grignolino", 2: "Barbera"})
    table.to_csv("wine.csv", index=False)
