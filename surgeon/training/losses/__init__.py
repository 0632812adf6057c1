"""What a step's loss is made of: the text's own, the teacher's, and each micro-batch's share of them."""
